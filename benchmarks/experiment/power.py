"""How often a slowdown of each step is found, and how soon.

    python benchmarks/experiment/power.py [--experiments 300] [--slowdown 0.03] [--noise recorded]

Found: at least one metric is called worse, and none better.
"""

import numpy as np
from simulate import arguments_of, most_named, run_all, spread, write


def main() -> None:
    parser = arguments_of(str(__doc__), 300, "power.json.gz")
    parser.add_argument("--slowdown", type=float, default=0.03, help="share by which a step takes longer")
    arguments = parser.parse_args()
    noises = arguments.noise.split(",")
    runs = list(run_all(noises, arguments.experiments, arguments.slowdown, arguments))
    write(runs, arguments)
    print(f"\nA slowdown of {arguments.slowdown:.1%} in each step, in at most {arguments.minutes:g} minutes:\n")
    print("| noise | experiments | found | called better | step_time: estimate, half width | most often | "
          "minutes (10 % … 90 %) |")
    print("|---|---:|---:|---:|---:|---|---:|")
    for name in noises:
        of_it = [run for run in runs if run.noise == name]
        wrong = [run for run in of_it if "better" in run.verdicts.values()]
        found = [run for run in of_it if "worse" in run.verdicts.values() and run not in wrong]
        steps = [one for run in of_it for one in run.comparisons if one["metric"] == "step_time"]
        estimate = np.median([one["effect"] for one in steps])
        width = np.median([(one["high"] - one["low"]) / 2 for one in steps])
        print(f"| {name} | {len(of_it)} | {len(found)} ({len(found) / len(of_it):.1%}) | {len(wrong)} | "
              f"{estimate:+.2%}, {width:.2%} | {most_named(found)} | {spread([run.minutes for run in of_it])} |")


if __name__ == "__main__":
    main()
