"""The core's own tests: `make test-core`, in under a minute.

They need `minifsdp/core/`, and nothing else of minifsdp or of `tests/`. To take both along:

    cp -r minifsdp/core my_fsdp
    cp -r tests/core my_tests
    sed -i 's/minifsdp\\.core/my_fsdp/' my_tests/*.py
    python -m pytest my_tests
"""
