// Draws the cost of a step's cells: a column is a rank, a row a micro-step.
//
// Invariants: shades are cividis, even in lightness; where there are few cells each has its number,
// a multiple of the mean cell.

const MOST_COLUMNS = 512, LEAST_CELL = 26, FEW_ROWS = 12;
const CIVIDIS = ["#00224e", "#0a2f6b", "#2a3f6d", "#414d6b", "#555b6c", "#696970", "#7d7876",
  "#938979", "#aa9a73", "#c3ac69", "#dcbf57", "#fee838"].map((shade) =>
  [1, 3, 5].map((at) => parseInt(shade.slice(at, at + 2), 16)));

function colour(part) {
  const at = part * (CIVIDIS.length - 1), low = CIVIDIS[Math.floor(at)], high = CIVIDIS[Math.ceil(at)];
  return low.map((value, i) => Math.round(value + (high[i] - value) * (at % 1)));
}

export function isFew(canvas, cells) {
  return canvas.clientWidth / cells[0].length >= LEAST_CELL && cells.length <= FEW_ROWS;
}

/** One pixel a cell, or the costliest of a few ranks; CSS makes it large. Few cells have numbers. */
export function draw(canvas, cells, most) {
  if (isFew(canvas, cells)) return drawFew(canvas, cells, most);
  const fold = Math.ceil(cells[0].length / MOST_COLUMNS), width = Math.ceil(cells[0].length / fold);
  canvas.width = width;
  canvas.height = cells.length;
  canvas.style.height = `${Math.max(72, Math.min(220, cells.length * 22))}px`;
  const context = canvas.getContext("2d"), image = context.createImageData(width, cells.length);
  cells.forEach((row, y) => {
    for (let x = 0; x < width; x++) {
      const cost = Math.max(...row.slice(x * fold, (x + 1) * fold));
      image.data.set([...colour(cost / most), 255], 4 * (y * width + x));
    }
  });
  context.putImageData(image, 0, 0);
}

function drawFew(canvas, cells, most) {
  const ratio = window.devicePixelRatio || 1, height = 24 * cells.length;
  canvas.style.height = `${height}px`;
  canvas.width = canvas.clientWidth * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d"), columns = cells[0].length;
  const mean = cells.flat().reduce((a, b) => a + b, 0) / (cells.length * columns) || 1;
  const wide = canvas.width / columns, high = canvas.height / cells.length;
  context.font = `${11.5 * ratio}px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  cells.forEach((row, y) => row.forEach((cost, x) => {
    context.fillStyle = `rgb(${colour(cost / most)})`;
    context.fillRect(x * wide, y * high, wide - ratio, high - ratio);
    context.fillStyle = cost / most > 0.5 ? "#000" : "#fff";
    context.fillText((cost / mean).toFixed(1), (x + 0.5) * wide, (y + 0.5) * high);
  }));
}
