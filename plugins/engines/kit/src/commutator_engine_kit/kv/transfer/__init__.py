"""KV transfer between workers: from prefill to decode workers, and from a peer's tiers.

``protocol`` describes the messages. Engines that transfer KV by themselves do not use this package.
"""
