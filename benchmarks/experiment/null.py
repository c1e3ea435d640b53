"""How often two equal arms are told apart: it must be at most in one experiment of twenty, whatever the noise.

    python benchmarks/experiment/null.py [--experiments 180] [--noise recorded,drift]
"""

from simulate import arguments_of, most_named, run_all, spread, write


def main() -> None:
    arguments = arguments_of(str(__doc__), 180, "null.json.gz").parse_args()
    noises = arguments.noise.split(",")
    runs = list(run_all(noises, arguments.experiments, 0.0, arguments))
    write(runs, arguments)
    print("\n| noise | experiments | with any better or worse | which | minutes (10 % … 90 %) |")
    print("|---|---:|---:|---|---:|")
    for name in noises:
        of_it = [run for run in runs if run.noise == name]
        wrong = [run for run in of_it if run.verdicts]
        print(f"| {name} | {len(of_it)} | {len(wrong)} ({len(wrong) / len(of_it):.1%}) | {most_named(wrong)} | "
              f"{spread([run.minutes for run in of_it])} |")


if __name__ == "__main__":
    main()
