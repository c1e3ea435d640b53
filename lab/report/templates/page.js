const figures = JSON.parse(document.getElementById("figures").textContent);
const config = {responsive: true, displayModeBar: false};

function draw(element, name) {
  const figure = figures[name];
  Plotly.react(element, figure.data, figure.layout, config);
}

for (const element of document.querySelectorAll(".plot")) draw(element, element.dataset.figure);

const choice = document.getElementById("paired-choice");
if (choice) choice.addEventListener("change", () => draw(document.getElementById("paired"), choice.value));
