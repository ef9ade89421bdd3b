// Shows the values of line charts: under the pointer, and with the arrow keys once a chart has the focus.
// Each line carries its points: data-points = [[x, y, x in pixels of the picture], ...].
"use strict";
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const lines = [...svg.querySelectorAll("[data-points]")].map((node) => ({
    name: node.dataset.name,
    points: JSON.parse(node.dataset.points),
  }));
  const frame = svg.parentElement;
  const says = document.createElement("p");
  says.className = "says";
  says.setAttribute("aria-live", "polite");
  says.textContent = "Point at the chart, or use the arrow keys, to read values.";
  frame.after(says);
  const rule = document.createElementNS(svg.namespaceURI, "line");
  rule.setAttribute("class", "rule");
  rule.setAttribute("y1", svg.dataset.top);
  rule.setAttribute("y2", svg.dataset.bottom);
  svg.append(rule);
  const stops = [...new Map(lines.flatMap((line) => line.points.map((p) => [p[0], p[2]]))).entries()];
  stops.sort((a, b) => a[0] - b[0]);
  let at = -1;

  function show(index) {
    at = Math.max(0, Math.min(stops.length - 1, index));
    const [x, pixel] = stops[at];
    rule.setAttribute("x1", pixel);
    rule.setAttribute("x2", pixel);
    rule.setAttribute("visibility", "visible");
    const values = lines.flatMap((line) =>
      line.points.filter((p) => p[0] === x).map((p) => `${line.name} ${+p[1].toPrecision(5)}`)
    );
    says.textContent = `${svg.dataset.chart} ${+x.toPrecision(7)}: ${values.join(", ")}`;
  }

  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const pixel = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    let best = 0;
    stops.forEach((stop, i) => {
      if (Math.abs(stop[1] - pixel) < Math.abs(stops[best][1] - pixel)) best = i;
    });
    show(best);
  });
  frame.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: stops.length - 1 };
    if (event.key in moves) {
      show(moves[event.key]);
      event.preventDefault();
    }
  });
}
