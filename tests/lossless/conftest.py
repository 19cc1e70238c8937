import pytest


@pytest.fixture(autouse=True)
def _no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a million rounds would spend a quarter of their time on spans nobody reads."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
