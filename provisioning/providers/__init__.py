"""Providers of pods, behind one protocol: protocol.py.

Base classes: hosts.py for the user's own machines; for clouds, http.py (`HttpCloud`) if they have a JSON API, and
cloud.py (`Cloud`) if they have a client library.

To add a cloud:

1. Add a file here with its class, derived from HttpCloud, like vast.py. It defines HttpCloud's attributes, `refusal`,
   which interprets the API's error answers, and the methods of protocol.py that HttpCloud lacks. It is constructed with
   (environment, ssh_key). Request pods that open PORTS (pods/pod.py) besides SSH, and that have an IPv4 address.
2. Add its line to `_CLOUDS` in registry.py, and update the help texts with `make docs`.
3. Add an emulator of its API to tests/support, based on http_api.py, and its line to CLOUDS in tests/support/clouds.py.
   It has to pass `pytest tests/pods/test_conformance.py --exhaustive -k NAME`.
4. Add a row to the table in docs/tutorials/gpu-pods.md, and its name to README.md.

tests/unit/provisioning/providers/test_registry.py fails while step 3 or 4 is missing.
"""
