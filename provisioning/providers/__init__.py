"""Where pods come from: providers behind one protocol, protocol.py.

hosts.py is the base for machines that are there anyway; for those that are rented it is cloud.py (`Cloud`, for a cloud
with a client library of its own), or http.py (`HttpCloud`, for one with a JSON API).

To add a cloud:

1. A file here with a class for it, as vast.py: based on HttpCloud, with its attributes, `refusal`, which says what the
   API's error answers mean, and the methods of protocol.py that HttpCloud lacks. It is made with (environment,
   ssh_key). Ask for pods that open PORTS (pods/pod.py) besides SSH, and are reached at an IPv4 address.
2. Its line in `_CLOUDS` of registry.py. Help texts and error messages have it from there: `make docs` writes them anew.
3. An emulator of its API in tests/support, based on http_api.py, and its line in CLOUDS of tests/support/clouds.py:
   `pytest tests/pods/test_conformance.py --exhaustive -k NAME` is what it has to pass.
4. A row in the table of docs/tutorials/gpu-pods.md, and its name in README.md.

tests/unit/provisioning/providers/test_registry.py fails while the third or fourth is missing.
"""
