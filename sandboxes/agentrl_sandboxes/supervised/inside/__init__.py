"""Code that runs *inside* the sandbox, with nothing but the standard library.

These modules are handed to the sandbox as data, never imported by the host except for tests and
for :mod:`wire`, which both sides share. They may run under another Python than the host's
(3.9 or later), so they use nothing newer.
"""
