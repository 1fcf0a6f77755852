"""The HTTP door of the router: OpenAI's API, with vLLM's extensions.

A request becomes the same message that a gRPC client sends and takes the same path from there
(``generate.request.InboundCall``): checks, limits, quotas and errors exist once.
"""
