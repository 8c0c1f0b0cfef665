"""Providers of pods, behind one protocol: protocol.py.

Base classes: hosts.py for the user's own machines; for clouds, http.py (`HttpCloud`) if they have a JSON API, to which
the key is sent as a bearer token, and cloud.py (`Cloud`) if they have a client library.

To add a cloud:

1. Add a file here with its class, derived from HttpCloud. Models are lambda_cloud.py for virtual machines, runpod.py
   for containers, and vast.py if each machine is offered once. The class defines the attributes of Cloud and HttpCloud,
   `refusal`, which interprets the API's error answers, and the methods of protocol.py that HttpCloud lacks. Request
   pods that open PORTS (pods/pod.py) besides SSH, have an IPv4 address, and bring Python 3.11 to 3.13 or uv
   (machines/setup.py makes the environment). Read the number of GPUs and the price of each pod from the API, so that a
   pod that differs from the order is noticed. Read paged lists to the end.
2. Add its line to `_CLOUDS` in registry.py, and update the help texts with `python -m diloco.cli.reference`.
3. Add an emulator of its API to tests/support, based on http_api.py, and its entry to CLOUDS in
   tests/support/clouds.py. It has to pass `pytest tests/pods/test_conformance.py --exhaustive -k NAME`. Add the API's
   error answers to CASES in tests/unit/provisioning/providers/test_http.py. What no other cloud does, such as Lium's
   rental ends, needs tests of its own in tests/pods/test_NAME.py.
4. Add a row to the table in docs/tutorials/gpu-pods.md, its name to README.md, and a line to CHANGELOG.md.

tests/unit/provisioning/providers/test_registry.py fails while the entry of step 3, or the guide or README of step 4, is
missing.
"""
