"""One short test of each adapter with a real object of its library; `tests/integrations` tests them at length."""

from __future__ import annotations
