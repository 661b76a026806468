"""Entry point: `python -m examples.demo`, in the root of the repository, runs a demo."""

from examples.demo.command import main

if __name__ == "__main__":
    raise SystemExit(main())
