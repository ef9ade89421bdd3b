// Search on a page that was opened as a file: browsers start no worker from one, so a frame stands in for it.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      // What the worker says, its owner hears; what the owner says, it hears once its script is there.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = new URL(address, location.href).href;
      this.ready = new Promise((resolve) => script.addEventListener("load", resolve));
      this.inside = inside;
      inside.document.head.append(script);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }
  };
}
