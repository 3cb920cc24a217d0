// Draw numbers as colours on a canvas, from 0 to the end of a scale.

// The end of a scale: the largest value, but at least twice uniform attention, so that uniform maps look uniform.
export function scaleEnd(values, numTokens) {
  return Math.max(...values, 2 / numTokens);
}

// One pixel per patch: the page enlarges the canvas without smoothing.
export function paintMap(canvas, values, columns, colours, end) {
  const rows = values.length / columns;
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext('2d');
  const pixels = context.createImageData(columns, rows);
  values.forEach((value, index) => {
    const step = Math.min(255, Math.round((255 * value) / end));
    for (let channel = 0; channel < 3; channel++) pixels.data[4 * index + channel] = colours[3 * step + channel];
    pixels.data[4 * index + 3] = 255;
  });
  context.putImageData(pixels, 0, 0);
}

// Draw an image of height × width × 1 or 3 bytes.
export function paintImage(canvas, image) {
  const [height, width, channels] = image.shape;
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext('2d');
  const pixels = context.createImageData(width, height);
  for (let index = 0; index < width * height; index++) {
    for (let channel = 0; channel < 3; channel++)
      pixels.data[4 * index + channel] = image.data[index * channels + (channels === 3 ? channel : 0)];
    pixels.data[4 * index + 3] = 255;
  }
  context.putImageData(pixels, 0, 0);
}
