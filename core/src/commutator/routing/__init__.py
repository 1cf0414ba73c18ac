"""From a request to the worker that serves it.

Follow one: ``dispatcher`` takes it, ``placer`` finds a worker (``pool``, ``busy``, ``admission``)
by asking the policy (``contract``; ``stages`` for ``pipeline``), ``dispatch`` follows it on its
``leg`` to the end, and ``migration`` says what becomes of it when the worker fails. With prefill
and decode apart (``apart``, ``disagg``), ``handover_stream`` runs its two legs.

Who there is: ``membership`` hears of workers from the registry, ``view`` holds connections to them,
``model_workers`` has what one model's requests are routed by.

What the policy is shown: ``overlap``, out of the ``prefix_index`` that ``event_subscriber`` keeps
by the engines' events (``approximate`` without them), and ``load``, shared with other front doors
by ``peer_loads``. ``replay`` runs all of it in virtual time.
"""
