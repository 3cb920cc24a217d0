// Base64 of gzipped safetensors -> named typed arrays.

const KINDS = { F32: Float32Array, U8: Uint8Array, I32: Int32Array };

export async function openArrays(text) {
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('gzip'));
  return parse(await new Response(stream).arrayBuffer());
}

export function parse(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const found = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === '__metadata__') continue;
    const [start, end] = entry.data_offsets;
    const bytes = buffer.slice(8 + length + start, 8 + length + end);
    found[name] = { shape: entry.shape, data: new KINDS[entry.dtype](bytes) };
  }
  return found;
}
