"""Whose waiting request is next. Core brings the kinds `weighted`, the default, and `fifo`."""
