"""Prometheus metrics of a front-door process."""

from __future__ import annotations
