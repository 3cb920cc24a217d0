// Map numbers to colours, from 0 to a labelled maximum; uniform attention must not look like structure.

// At least twice uniform attention.
export function topOf(values, tokens) {
  return Math.max(...values, 2 / tokens);
}

// One pixel per patch: the page enlarges the canvas without smoothing.
export function paint(canvas, values, columns, table, top) {
  const rows = values.length / columns;
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext('2d');
  const pixels = context.createImageData(columns, rows);
  values.forEach((value, place) => {
    const step = Math.min(255, Math.round((255 * value) / top));
    for (let part = 0; part < 3; part++) pixels.data[4 * place + part] = table[3 * step + part];
    pixels.data[4 * place + 3] = 255;
  });
  context.putImageData(pixels, 0, 0);
}

// The image itself, height × width × 1 or 3 bytes.
export function paintImage(canvas, image) {
  const [height, width, channels] = image.shape;
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext('2d');
  const pixels = context.createImageData(width, height);
  for (let place = 0; place < width * height; place++) {
    for (let part = 0; part < 3; part++)
      pixels.data[4 * place + part] = image.data[place * channels + (channels === 3 ? part : 0)];
    pixels.data[4 * place + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
}
