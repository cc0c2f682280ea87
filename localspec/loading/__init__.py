"""From options to a running backend: where models go, which drafters they get, what is remembered.

`service` opens the page's service over an engine in its own process. In that process
`local_backend` loads the target where `placement` says and `fitting` has compared the memory, and
`drafters` builds what may draft for it.
"""
