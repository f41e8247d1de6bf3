// Dialog that takes a photograph with the camera of the computer.

/** Return whether to use the dialog; phones open their camera app through a file input. */
export function hasDialog() {
  return Boolean(navigator.mediaDevices?.getUserMedia) && matchMedia("(pointer: fine)").matches;
}

async function open() {
  try {
    return await navigator.mediaDevices.getUserMedia({ video: { width: { ideal: 1920 }, height: { ideal: 1080 } } });
  } catch (error) {
    throw new Error(error.name === "NotAllowedError"
      ? "The browser does not allow the camera; allow it for this page, or choose a file."
      : "No camera could be opened; connect one, or choose a file.");
  }
}

/** Show what the camera sees; return a photograph as a file, or null if the user closes the dialog. */
export async function photograph(name) {
  const dialog = document.getElementById("camera"), video = dialog.querySelector("video");
  const stream = await open();
  let canvas = null;
  const take = () => {
    canvas = new OffscreenCanvas(video.videoWidth, video.videoHeight);
    canvas.getContext("2d").drawImage(video, 0, 0);
  };
  try {
    video.srcObject = stream;
    await video.play();
    dialog.showModal();
    document.getElementById("camera-take").addEventListener("click", take, { once: true });
    await new Promise((done) => dialog.addEventListener("close", done, { once: true }));
    if (!canvas) return null;
    const blob = await canvas.convertToBlob({ type: "image/jpeg", quality: 0.95 });
    return new File([blob], name, { type: blob.type });
  } finally {
    document.getElementById("camera-take").removeEventListener("click", take);
    for (const track of stream.getTracks()) track.stop();
    video.srcObject = null;
  }
}
