// Tables are sorted by a click on a head.
for (const head of document.querySelectorAll('th')) head.addEventListener('click', () => {
  const table = head.closest('table'), place = head.cellIndex, body = table.tBodies[0];
  const up = head.getAttribute('aria-sort') === 'descending';
  for (const other of table.querySelectorAll('th')) other.removeAttribute('aria-sort');
  head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
  const key = row => {
    const text = row.cells[place].textContent, number = parseFloat(text.replaceAll(',', ''));
    return isNaN(number) ? text : number;
  };
  const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === 'number' ? -1 : 1;
  const rows = [...body.rows].sort((a, b) => order(key(a), key(b)));
  body.append(...(up ? rows : rows.reverse()));
});

// Ticks of an axis between two values, as pairs of value and text: plain numbers, 8 at most.
function ticks(scale, low, high) {
  const made = [], show = (value, digits) =>
    made.push([value, value.toLocaleString('en', {minimumFractionDigits: digits, maximumFractionDigits: digits})]);
  if (scale === 'log' && high / low > 10) {
    for (const factors of [[1, 2, 5], [1, 3], [1]]) {
      made.length = 0;
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        for (const factor of factors) {
          const value = factor * 10 ** power;
          if (low <= value && value <= high) show(value, Math.max(0, -power));
        }
      if (made.length <= 8) break;
    }
  } else {
    const power = Math.floor(Math.log10((high - low) / 8));
    const step = [1, 2, 5, 10].map(factor => factor * 10 ** power).find(step => (high - low) / step <= 8);
    for (let at = Math.ceil(low / step); at * step <= high; at++) show(at * step, Math.max(0, -power));
  }
  return made;
}

// Plots zoom: `seen` is the share of the frame that fills it now, [from, to] along x and y. What is drawn moves, ticks
// are made anew, and names keep their size beside their points.
for (const axes of document.querySelectorAll('figure g[data-x]')) {
  const svg = axes.ownerSVGElement, box = axes.querySelector('path').getBBox();
  const start = {x: box.x, y: box.y}, size = {x: box.width, y: box.height}, seen = {x: [0, 1], y: [0, 1]};
  const place = (axis, at) =>
    start[axis] + ((at - start[axis]) / size[axis] - seen[axis][0]) / (seen[axis][1] - seen[axis][0]) * size[axis];
  const inside = (axis, at) => at > start[axis] - 0.5 && at < start[axis] + size[axis] + 0.5;
  const own = query => [...axes.querySelectorAll(query)].filter(one => !one.closest('[id*="matplotlib.axis"], [id*="legend"]'));
  const at = one => ({x: +one.getAttribute('x'), y: +one.getAttribute('y')});

  const lines = own('path[clip-path]').map(path => [path, path.getAttribute('d')]);
  const points = own('[clip-path] use').map(mark => [mark, at(mark)]);
  const names = own('g[id*="-text_"]').map(group => {
    const word = group.querySelector('text'), text = at(word), before = group.previousElementSibling;
    const side = {start: -9, end: 9}[word.style.textAnchor] ?? 0;  // as pareto.py puts names beside their points
    const leader = before?.querySelector('path')?.getAttribute('d').match(/Q.* (\S+) (\S+)\s*$/s);
    const far = point => Math.hypot(point.x - text.x - side, point.y - text.y);
    const nearest = points.map(([, point]) => point).sort((a, b) => far(a) - far(b))[0] ?? text;
    return [leader ? [group, before] : [group], leader ? {x: +leader[1], y: +leader[2]} : nearest, text];
  }).filter(([, , text]) => inside('x', text.x) && inside('y', text.y));
  const marks = {};
  for (const axis of ['x', 'y'])
    marks[axis] = [...axes.querySelectorAll(`g[id*="-${axis}tick_"]`)].map(group => [group, at(group.querySelector('use'))[axis]]);

  function put(axis, group, from, to) {
    group.setAttribute('transform', axis === 'x' ? `translate(${to - from} 0)` : `translate(0 ${to - from})`);
    group.style.display = inside(axis, to) ? '' : 'none';
  }
  function draw() {
    for (const [path, d] of lines)
      path.setAttribute('d', d.replace(/(-?[\d.]+) (-?[\d.]+)/g, (_, x, y) => `${place('x', +x)} ${place('y', +y)}`));
    for (const [mark, point] of points) for (const axis of ['x', 'y']) mark.setAttribute(axis, place(axis, point[axis]));
    for (const [groups, point] of names) {
      const [x, y] = [place('x', point.x), place('y', point.y)];
      for (const group of groups) {
        group.setAttribute('transform', `translate(${x - point.x} ${y - point.y})`);
        group.style.display = inside('x', x) && inside('y', y) ? '' : 'none';
      }
    }
    for (const axis of ['x', 'y']) {
      for (const made of axes.querySelectorAll(`[data-made=${axis}]`)) made.remove();
      const [scale, low, high] = axes.dataset[axis].split(' ').map((word, i) => i ? +word : word);
      const whole = seen[axis][0] === 0 && seen[axis][1] === 1, model = marks[axis].find(([g]) => g.querySelector('text'));
      if (whole || scale === 'fixed' || !model) {
        for (const [group, from] of marks[axis]) put(axis, group, from, place(axis, from));
        continue;
      }
      for (const [group] of marks[axis]) group.style.display = 'none';
      const share = part => axis === 'x' ? part : 1 - part;  // y grows upwards
      const value = part => scale === 'log' ? low * (high / low) ** part : low + (high - low) * part;
      const ends = seen[axis].map(part => value(share(part))).sort((a, b) => a - b);
      for (const [number, text] of ticks(scale, ...ends)) {
        const part = scale === 'log' ? Math.log(number / low) / Math.log(high / low) : (number - low) / (high - low);
        const group = model[0].cloneNode(true);
        group.querySelectorAll('defs').forEach(one => one.remove());
        [group, ...group.querySelectorAll('[id]')].forEach(one => one.removeAttribute('id'));
        group.dataset.made = axis;
        group.querySelector('text').textContent = text;
        model[0].parentNode.append(group);
        put(axis, group, model[1], place(axis, start[axis] + share(part) * size[axis]));
      }
    }
  }
  function zoom(axis, from, to) {  // to what lies between these two places of the frame
    const [first, last] = seen[axis], part = at => Math.min(1, Math.max(0, (at - start[axis]) / size[axis]));
    const next = [from, to].map(at => first + part(at) * (last - first));
    if (next[1] - next[0] > 1e-4) seen[axis] = next;
  }

  const pointer = event => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const over = point => inside('x', point.x) && inside('y', point.y);
  let from = null, band = null;
  svg.addEventListener('pointerdown', event => {
    if (event.button || !over(pointer(event))) return;
    from = pointer(event);
    band = svg.appendChild(document.createElementNS(svg.namespaceURI, 'rect'));
    band.setAttribute('class', 'band');
    event.preventDefault();
  });
  addEventListener('pointermove', event => {
    if (!from) return;
    const to = pointer(event), ends = {x: [from.x, to.x], y: [from.y, to.y]};
    for (const [axis, length] of [['x', 'width'], ['y', 'height']]) {
      band.setAttribute(axis, Math.min(...ends[axis]));
      band.setAttribute(length, Math.abs(ends[axis][1] - ends[axis][0]));
    }
  });
  addEventListener('pointerup', event => {
    if (!from) return;
    const to = pointer(event), ends = {x: [from.x, to.x], y: [from.y, to.y]};
    for (const axis of ['x', 'y']) {
      const [low, high] = ends[axis].sort((a, b) => a - b);
      if (high - low > 6) zoom(axis, low, high);
    }
    from = null;
    band.remove();
    draw();
  });
  svg.addEventListener('wheel', event => {
    const to = pointer(event);
    if (!(event.ctrlKey || event.metaKey) || !over(to)) return;
    const factor = event.deltaY < 0 ? 0.8 : 1.25;
    for (const axis of ['x', 'y']) {
      const [low, high] = seen[axis], center = low + (to[axis] - start[axis]) / size[axis] * (high - low);
      const next = seen[axis].map(end => Math.min(1, Math.max(0, center + (end - center) * factor)));
      if (next[1] - next[0] > 1e-4) seen[axis] = next;
    }
    event.preventDefault();
    draw();
  }, {passive: false});
  svg.addEventListener('dblclick', event => {
    if (over(pointer(event))) { seen.x = [0, 1]; seen.y = [0, 1]; draw(); }
  });
}
