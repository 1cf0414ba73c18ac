"""Finds the candidates that cost least without a look at each of a thousand workers.

``load_index`` holds the ranks by their loads, as bit masks, and searches them. ``pool`` keeps it up
to date, and gives it to policies as a ``CandidatePool``.
"""
