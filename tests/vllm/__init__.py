"""A gateway before a real vLLM: `make test-vllm`. `make test` never runs it, as its files are not named test_*.py."""
