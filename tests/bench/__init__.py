"""Benchmarks: `make bench`. Each bench_*.py has `main() -> list[Row]`; figures are kept in RESULTS.md."""
