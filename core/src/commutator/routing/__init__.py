"""From a request to the worker that serves it.

``dispatcher`` takes a request. ``placement`` finds its worker: ``router`` asks the policy about
candidates, ``queue`` holds the request while every worker is busy. ``dispatch`` follows it to the
end, and decides what follows a worker's failure.
``forward`` passes a request on as it came. ``disagg/`` prefills at one worker and decodes at
another.

``membership`` follows the registry; ``workers`` holds the connections. Policies see each worker's
overlap with the prompt, from ``prefix_index/``, and its ``load``, with that of other front doors
by ``replica_sync``. Among many workers ``shortlist`` finds those that cost least.
"""
