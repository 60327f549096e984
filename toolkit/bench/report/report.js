// Shows the nearest value of each line at the pointer.
for (const figure of document.querySelectorAll("figure")) {
  const series = JSON.parse(figure.dataset.series);
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const shown = figure.querySelector("output");
  if (!series.length) continue;
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const lines = series.map(({name, px, y}) => {
      const near = px.reduce((best, p, i) => Math.abs(p - x) < Math.abs(px[best] - x) ? i : best, 0);
      cursor.setAttribute("x1", px[near]);
      cursor.setAttribute("x2", px[near]);
      return `${name}: ${y[near]}`;
    });
    shown.textContent = lines.join("\n");
    shown.style.left = Math.min(event.clientX - box.left + 24, box.width - shown.offsetWidth) + "px";
    shown.style.visibility = cursor.style.visibility = "visible";
  });
  svg.addEventListener("pointerleave", () => {
    shown.style.visibility = cursor.style.visibility = "hidden";
  });
}
