// Problems of the visible page: duplicate ids, images without alt, headings that skip a level, text of too little contrast.
() => {
    const problems = [];
    const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
    for (const id of new Set(ids.filter((id, i) => ids.indexOf(id) !== i))) problems.push(`duplicate id ${id}`);
    for (const image of document.querySelectorAll("img:not([alt])")) problems.push(`no alt: ${image.outerHTML}`);
    const shown = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
    let level = 0;
    for (const heading of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
        if (!shown(heading) || heading.closest("dialog")) continue;
        const next = Number(heading.tagName[1]);
        if (next > level + 1) problems.push(`heading ${heading.textContent} skips a level`);
        level = next;
    }
    const canvas = document.createElement("canvas");
    const ctx = canvas.getContext("2d", { willReadFrequently: true });
    // Any color that CSS knows, as red, green, blue and alpha.
    const rgba = (color) => {
        ctx.clearRect(0, 0, 1, 1);
        ctx.fillStyle = color;
        ctx.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = ctx.getImageData(0, 0, 1, 1).data;
        return [r, g, b, a / 255];
    };
    const over = (top, bottom) => [0, 1, 2].map((c) => top[c] * top[3] + bottom[c] * (1 - top[3])).concat(1);
    const background = (element) => {
        if (!element) return [255, 255, 255, 1];
        const own = rgba(getComputedStyle(element).backgroundColor);
        return own[3] > 0.99 ? own : over(own, background(element.parentElement));
    };
    const light = (color) => {
        const [r, g, b] = color.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    let checked = 0;
    for (const element of document.body.querySelectorAll("*")) {
        const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data).join("").trim();
        const box = element.getBoundingClientRect();
        if (!text || !shown(element) || box.width <= 1 || element.matches(":disabled, option, script")) continue;
        const style = getComputedStyle(element), below = background(element), color = over(rgba(style.color), below);
        const [a, b] = [light(color), light(below)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05), size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        checked += 1;
        if (ratio < (large ? 3 : 4.5)) problems.push(`contrast ${ratio.toFixed(2)}: ${element.tagName} "${text.slice(0, 40)}"`);
    }
    if (checked < 10) problems.push(`only ${checked} texts were checked`);
    if (document.documentElement.scrollWidth > innerWidth) problems.push(`the page is ${document.documentElement.scrollWidth} px wide`);
    return problems;
}
