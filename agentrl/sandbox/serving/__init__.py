"""The sandbox server: boxes of any backend over HTTP, for trainers on other machines.

``fleet`` starts N ``worker`` processes behind one socket, each with a backend and a pool of its
own; ``app`` is what each of them serves, ``peers`` how a request reaches the worker that holds
its box, ``leases`` how long a box lives without its client. ``wire`` is shared with the client.
"""
