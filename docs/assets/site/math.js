// Formulas are in the pages as \(...\) and \[...\], which KaTeX turns into what readers see.
document$.subscribe(({ body }) => {
  for (const element of body.querySelectorAll(".arithmatex:not(.rendered)")) {
    const tex = element.textContent.trim();
    katex.render(tex.slice(2, -2), element, { displayMode: tex.startsWith("\\["), throwOnError: true });
    element.classList.add("rendered");
  }
});
