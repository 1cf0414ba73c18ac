"""The processes of a deployment: starting, watching, finding and stopping them."""

from __future__ import annotations
