"""Plots of benchmarks, by matplotlib where it is installed."""

from __future__ import annotations

from typing import Any

from tpengine.errors import ConfigError


def import_pyplot() -> Any:
    """matplotlib's pyplot, for files rather than screens. Whoever measures for a plot calls this
    first: it must not fail after the measurement.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib, or leave "
            "--plot out"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
