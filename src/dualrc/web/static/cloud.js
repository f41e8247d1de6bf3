// WebGL view of points and cameras, with orbit controls for mouse, touch and keyboard.

const POINTS = {
  vertex: `
    attribute vec3 position; attribute vec3 color; attribute float track;
    uniform mat4 camera; uniform float size; uniform float least;
    varying vec3 shade;
    void main() {
      gl_Position = track < least ? vec4(2.0, 2.0, 2.0, 1.0) : camera * vec4(position, 1.0);
      gl_PointSize = size;
      shade = color;
    }`,
  fragment: `
    precision mediump float; varying vec3 shade;
    void main() {
      vec2 at = gl_PointCoord - 0.5;
      if (dot(at, at) > 0.25) discard;
      gl_FragColor = vec4(shade, 1.0);
    }`,
};
const LINES = {
  vertex: "attribute vec3 position; uniform mat4 camera; void main() { gl_Position = camera * vec4(position, 1.0); }",
  fragment: "precision mediump float; uniform vec4 color; void main() { gl_FragColor = color; }",
};
// Vertical field of view, in radians.
const FOV = 0.9;
// The whole scene fills this fraction of the view, without this fraction of outliers at each end of an axis.
const FILLED = 0.9;
const FEW = 0.01;
const FIT_STEPS = 40;
const FIT_POINTS = 1000;

export class Cloud {
  yaw = 0;
  pitch = -0.25;
  size = 3;
  least = 2;
  showCameras = true;
  selectedPoint = -1;
  selectedCamera = -1;

  /** points: {xyz Float32Array, rgb Uint8Array, tracks Uint32Array, count}; cameras: [{center, corners, up, forward}] */
  constructor(canvas, points, cameras) {
    this.canvas = canvas;
    this.points = points;
    this.cameras = cameras;
    const gl = this.gl = canvas.getContext("webgl", { antialias: true, preserveDrawingBuffer: true });
    if (!gl) throw new Error("The 3D view needs WebGL; enable it or use another browser.");
    this.pointProgram = program(gl, POINTS);
    this.lineProgram = program(gl, LINES);
    this.buffers = {
      xyz: buffer(gl, points.xyz), rgb: buffer(gl, points.rgb), tracks: buffer(gl, Float32Array.from(points.tracks)),
      frames: buffer(gl, new Float32Array(cameras.flatMap((camera) => frame(camera).flat()))),
      mark: gl.createBuffer(),
    };
    this.reset();
    this.#listen();
    new ResizeObserver(() => (this.untouched ? this.reset() : this.draw())).observe(canvas);
  }

  /** Show the whole scene, from behind and above the cameras. */
  reset() {
    const up = normal(sum(this.cameras.map((camera) => camera.up)));
    const forward = sum(this.cameras.map((camera) => camera.forward));
    // World basis with z up, estimated from the cameras.
    const side = normal(cross(norm(cross(forward, up)) > 1e-3 ? forward : [up[1], up[2], up[0]], up));
    this.basis = [side, cross(up, side), up];
    const places = this.#sample();
    this.target = [0, 1, 2].map((axis) => median(places.map((place) => place[axis])));
    const centers = this.cameras.map((camera) => norm(minus(camera.center, this.target)));
    const spread = median(places.map((place) => norm(minus(place, this.target))));
    this.radius = Math.max(spread * 2.5, Math.min(Math.max(...centers), spread * 8)) || 1;
    this.distance = this.radius * 1.5;
    this.yaw = 0;
    this.pitch = -0.35;
    // Cameras that are much farther away than the others are wrong.
    const far = Math.max(spread * 8, median(centers) * 3);
    this.#fit(places, this.cameras.filter((_, number) => centers[number] <= far));
    this.untouched = true;
    this.draw();
  }

  /** Move and zoom until the view contains the cameras and all but a few points. */
  #fit(places, cameras) {
    const slope = Math.tan(FOV / 2), aspect = this.canvas.clientWidth / Math.max(1, this.canvas.clientHeight) || 1;
    const every = Math.ceil(places.length / FIT_POINTS), chosen = places.filter((_, index) => index % every === 0);
    for (let step = 0; step < FIT_STEPS; step++) {
      const matrix = this.#matrix(), { right, up } = this.#axes();
      // Positions from -1 to 1, and 0 in the center.
      const seen = (place) => project(matrix, place, 0, 2, 2).map((value, axis) => (axis < 2 ? value - 1 : value));
      const points = chosen.map(seen), frames = cameras.flatMap(({ center, corners }) => [center, ...corners]).map(seen);
      // What is nearest moves most, so it limits the step.
      const nearest = Math.min(...points.map(([, , w]) => w), ...frames.map(([, , w]) => w));
      if (nearest <= this.distance * 0.02) {
        this.distance *= 1.5;
        continue;
      }
      const ends = [0, 1].map((axis) => {
        const sorted = points.map((point) => point[axis]).sort((a, b) => a - b), few = Math.floor(sorted.length * FEW);
        const values = [sorted[few], sorted[sorted.length - 1 - few], ...frames.map((point) => point[axis])];
        return [Math.min(...values), Math.max(...values)];
      });
      const [x, y] = ends.map(([low, high]) => (low + high) / 2);
      const half = Math.max(...ends.map(([low, high]) => (high - low) / 2));
      this.target = this.target.map((value, axis) => value + (right[axis] * x * aspect - up[axis] * y) * slope * nearest);
      if (half > 0) this.distance += (half / FILLED - 1) * nearest;
    }
  }

  /** Move the view to the pose of a camera. */
  flyTo(number) {
    this.untouched = false;
    const camera = this.cameras[number], local = (vector) => this.basis.map((axis) => dot(axis, vector));
    const [x, y, z] = local(camera.forward);
    this.yaw = Math.atan2(-x, y);
    this.pitch = Math.asin(Math.max(-1, Math.min(1, z)));
    const depth = Math.max(dot(minus(this.target, camera.center), camera.forward), this.radius * 0.2);
    this.distance = depth;
    this.target = camera.center.map((value, axis) => value + camera.forward[axis] * depth);
    this.selectedCamera = number;
    this.draw();
  }

  turn(yaw, pitch) {
    this.untouched = false;
    this.yaw += yaw;
    this.pitch = Math.max(-1.55, Math.min(1.55, this.pitch + pitch));
    this.draw();
  }

  zoom(ratio) {
    this.untouched = false;
    this.distance = Math.max(this.radius * 1e-3, Math.min(this.radius * 50, this.distance * ratio));
    this.draw();
  }

  /** Move by a fraction of the height of the view. */
  pan(x, y) {
    this.untouched = false;
    const { right, up } = this.#axes(), scale = 2 * this.distance * Math.tan(FOV / 2);
    this.target = this.target.map((value, axis) => value - (right[axis] * x - up[axis] * y) * scale);
    this.draw();
  }

  draw() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = null;
      this.#draw();
    });
  }

  /** Return the point nearest to a position on the canvas, in CSS pixels, or -1. */
  pick(x, y, reach = 10) {
    const { clientWidth: width, clientHeight: height } = this.canvas, matrix = this.#matrix();
    const { xyz, tracks, count } = this.points;
    let best = -1, nearest = Infinity;
    for (let index = 0; index < count; index++) {
      if (tracks[index] < this.least) continue;
      const [px, py, w] = project(matrix, xyz, 3 * index, width, height);
      if (w <= 0) continue;
      const apart = Math.hypot(px - x, py - y);
      if (apart > reach) continue;
      // Prefer points near the pointer, then points near the viewer.
      const cost = w * (1 + apart / 3);
      if (cost < nearest) [best, nearest] = [index, cost];
    }
    return best;
  }

  /** Return the position of a point on the canvas, in CSS pixels, or null behind the viewer. */
  place(index) {
    return this.spot(this.points.xyz, 3 * index);
  }

  /** Return the position of xyz[at], xyz[at + 1], xyz[at + 2] on the canvas, in CSS pixels, or null behind the viewer. */
  spot(xyz, at = 0) {
    const [x, y, w] = project(this.#matrix(), xyz, at, this.canvas.clientWidth, this.canvas.clientHeight);
    return w > 0 ? [x, y] : null;
  }

  #axes() {
    const [side, ahead, top] = this.basis;
    const mix = (a, b, c) => side.map((_, axis) => a * side[axis] + b * ahead[axis] + c * top[axis]);
    const [sy, cy, sp, cp] = [Math.sin(this.yaw), Math.cos(this.yaw), Math.sin(this.pitch), Math.cos(this.pitch)];
    const forward = mix(-sy * cp, cy * cp, sp), right = mix(cy, sy, 0);
    return { forward, right, up: cross(right, forward) };
  }

  /** Return the matrix from world to clip coordinates, column by column. */
  #matrix() {
    const { forward, right, up } = this.#axes();
    const eye = this.target.map((value, axis) => value - forward[axis] * this.distance);
    const f = 1 / Math.tan(FOV / 2), aspect = this.canvas.clientWidth / Math.max(1, this.canvas.clientHeight);
    const near = this.distance * 0.01, far = this.distance + this.radius * 60;
    const rows = [
      [...right, -dot(right, eye)].map((value) => (value * f) / aspect),
      [...up, -dot(up, eye)].map((value) => value * f),
      [...forward, -dot(forward, eye)].map((value, column) => (value * (far + near)) / (far - near) - (column === 3 ? (2 * far * near) / (far - near) : 0)),
      [...forward, -dot(forward, eye)],
    ];
    return new Float32Array([0, 1, 2, 3].flatMap((column) => rows.map((row) => row[column])));
  }

  #draw() {
    const { gl, canvas } = this, ratio = Math.min(devicePixelRatio || 1, 2);
    const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
    if (!width || !height) return;
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const dark = matchMedia("(prefers-color-scheme: dark)").matches && document.documentElement.dataset.theme !== "light"
      || document.documentElement.dataset.theme === "dark";
    gl.viewport(0, 0, width, height);
    gl.clearColor(...(dark ? [0.03, 0.035, 0.045, 1] : [0.93, 0.94, 0.95, 1]));
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT);
    gl.enable(gl.DEPTH_TEST);
    const matrix = this.#matrix();
    this.#drawPoints(matrix, ratio);
    if (this.showCameras) this.#drawCameras(matrix, dark);
    if (this.selectedPoint >= 0) this.#drawMark(matrix);
  }

  #drawPoints(matrix, ratio) {
    const { gl, pointProgram: { id, at } } = this;
    gl.useProgram(id);
    gl.uniformMatrix4fv(at("camera"), false, matrix);
    gl.uniform1f(at("size"), this.size * ratio);
    gl.uniform1f(at("least"), this.least);
    attribute(gl, id, "position", this.buffers.xyz, 3, gl.FLOAT);
    attribute(gl, id, "color", this.buffers.rgb, 3, gl.UNSIGNED_BYTE, true);
    attribute(gl, id, "track", this.buffers.tracks, 1, gl.FLOAT);
    gl.drawArrays(gl.POINTS, 0, this.points.count);
  }

  #drawCameras(matrix, dark) {
    const { gl, lineProgram: { id, at } } = this;
    gl.useProgram(id);
    gl.uniformMatrix4fv(at("camera"), false, matrix);
    attribute(gl, id, "position", this.buffers.frames, 3, gl.FLOAT);
    gl.uniform4f(at("color"), ...(dark ? [0.62, 0.7, 1, 1] : [0.2, 0.31, 0.78, 1]));
    gl.drawArrays(gl.LINES, 0, this.cameras.length * 16);
    if (this.selectedCamera >= 0) {
      gl.uniform4f(at("color"), 0.93, 0.35, 0.1, 1);
      gl.disable(gl.DEPTH_TEST);
      gl.drawArrays(gl.LINES, this.selectedCamera * 16, 16);
    }
  }

  /** Draw a cross over the selected point and rays to the cameras that observe it. */
  #drawMark(matrix) {
    const { gl, lineProgram: { id, at } } = this, arm = this.distance * 0.02;
    const place = [...this.points.xyz.subarray(3 * this.selectedPoint, 3 * this.selectedPoint + 3)];
    const { right, up } = this.#axes(), lines = [];
    for (const axis of [right, up]) for (const sign of [-1, 1]) lines.push(...place.map((value, k) => value + sign * arm * axis[k]));
    for (const number of this.seenBy ?? []) lines.push(...place, ...this.cameras[number].center);
    gl.useProgram(id);
    gl.uniformMatrix4fv(at("camera"), false, matrix);
    gl.bindBuffer(gl.ARRAY_BUFFER, this.buffers.mark);
    gl.bufferData(gl.ARRAY_BUFFER, new Float32Array(lines), gl.DYNAMIC_DRAW);
    attribute(gl, id, "position", this.buffers.mark, 3, gl.FLOAT);
    gl.uniform4f(at("color"), 0.93, 0.35, 0.1, 1);
    gl.disable(gl.DEPTH_TEST);
    gl.drawArrays(gl.LINES, 0, lines.length / 3);
  }

  #listen() {
    const { canvas } = this, fingers = new Map();
    let moved = 0;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, [event.clientX, event.clientY]);
      if (fingers.size === 1) moved = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (!before) return;
      const [dx, dy] = [event.clientX - before[0], event.clientY - before[1]], height = canvas.clientHeight;
      moved += Math.abs(dx) + Math.abs(dy);
      const others = [...fingers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
      fingers.set(event.pointerId, [event.clientX, event.clientY]);
      if (others.length) {
        const [other] = others, apart = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]);
        this.zoom(apart(before) / Math.max(1, apart([event.clientX, event.clientY])));
        this.pan(dx / 2 / height, dy / 2 / height);
      } else if (event.shiftKey || event.buttons & 6) this.pan(dx / height, dy / height);
      else this.turn((-dx / height) * 3, (-dy / height) * 3);
    });
    for (const type of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(type, (event) => {
        const clicked = type === "pointerup" && fingers.size === 1 && moved < 5 && event.button === 0;
        fingers.delete(event.pointerId);
        if (clicked) this.onClick?.(event.offsetX, event.offsetY);
      });
    }
    canvas.addEventListener("contextmenu", (event) => event.preventDefault());
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY * (event.deltaMode ? 0.05 : 0.0015)));
    }, { passive: false });
    canvas.addEventListener("keydown", (event) => {
      const step = event.shiftKey ? (x, y) => this.pan(x * 0.05, y * 0.05) : (x, y) => this.turn(-x * 0.1, -y * 0.1);
      const keys = {
        ArrowLeft: () => step(-1, 0), ArrowRight: () => step(1, 0), ArrowUp: () => step(0, -1), ArrowDown: () => step(0, 1),
        "+": () => this.zoom(0.85), "=": () => this.zoom(0.85), "-": () => this.zoom(1 / 0.85), 0: () => this.reset(),
        Enter: () => this.onClick?.(canvas.clientWidth / 2, canvas.clientHeight / 2),
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();
      keys[event.key]();
    });
  }

  /** Return a sample of the points, to compute medians. */
  #sample() {
    const { xyz, count } = this.points, step = Math.max(1, Math.floor(count / 5000)), places = [];
    for (let index = 0; index < count; index += step) places.push([...xyz.subarray(3 * index, 3 * index + 3)]);
    return places.length ? places : this.cameras.map((camera) => camera.center);
  }
}

/** Return the 16 end points of the 8 lines of a camera frustum. */
function frame({ center, corners }) {
  const [a, b, c, d] = corners;
  return [center, a, center, b, center, c, center, d, a, b, b, c, c, d, d, a];
}

function project(matrix, xyz, at, width, height) {
  const [x, y, z] = [xyz[at], xyz[at + 1], xyz[at + 2]];
  const row = (k) => matrix[k] * x + matrix[4 + k] * y + matrix[8 + k] * z + matrix[12 + k];
  const w = row(3);
  return [((row(0) / w + 1) / 2) * width, ((1 - row(1) / w) / 2) * height, w];
}

function program(gl, { vertex, fragment }) {
  const id = gl.createProgram();
  for (const [kind, source] of [[gl.VERTEX_SHADER, vertex], [gl.FRAGMENT_SHADER, fragment]]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, source);
    gl.compileShader(shader);
    gl.attachShader(id, shader);
  }
  gl.linkProgram(id);
  if (!gl.getProgramParameter(id, gl.LINK_STATUS)) throw new Error(`WebGL: ${gl.getProgramInfoLog(id)}`);
  return { id, at: (name) => gl.getUniformLocation(id, name) };
}

function buffer(gl, data) {
  const made = gl.createBuffer();
  gl.bindBuffer(gl.ARRAY_BUFFER, made);
  gl.bufferData(gl.ARRAY_BUFFER, data, gl.STATIC_DRAW);
  return made;
}

function attribute(gl, id, name, data, size, type, normalized = false) {
  const at = gl.getAttribLocation(id, name);
  gl.bindBuffer(gl.ARRAY_BUFFER, data);
  gl.enableVertexAttribArray(at);
  gl.vertexAttribPointer(at, size, type, normalized, 0, 0);
}

const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]];
const minus = (a, b) => a.map((value, axis) => value - b[axis]);
const norm = (a) => Math.hypot(...a);
const sum = (vectors) => [0, 1, 2].map((axis) => vectors.reduce((total, vector) => total + vector[axis], 0));
const normal = (a) => (norm(a) > 1e-9 ? a.map((value) => value / norm(a)) : [0, 0, 1]);
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)] ?? 0;
