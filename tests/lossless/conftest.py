from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_spans() -> Iterator[None]:
    """Half a million rounds would spend a quarter of their time on spans nobody reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        yield
