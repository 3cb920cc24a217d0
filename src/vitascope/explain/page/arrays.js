// Read named typed arrays from gzipped safetensors in base64.

const ARRAY_TYPES = { F32: Float32Array, U8: Uint8Array, I32: Int32Array };

export async function openArrays(text) {
  const compressed = Uint8Array.from(atob(text.trim()), (character) => character.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return parseSafetensors(await new Response(stream).arrayBuffer());
}

export function parseSafetensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const arrays = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === '__metadata__') continue;
    const [start, end] = entry.data_offsets;
    const bytes = buffer.slice(8 + length + start, 8 + length + end);
    arrays[name] = { shape: entry.shape, data: new ARRAY_TYPES[entry.dtype](bytes) };
  }
  return arrays;
}
