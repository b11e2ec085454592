# SPDX-License-Identifier: Apache-2.0
"""Which normative statements of MQTT the code obeys, and which tests prove it.

How statements are cited, in code and in tests:

- ``[MQTT-3.1.2-4]`` is MQTT 3.1.1's. The two standards number many statements differently, so one of 5.0 is
  ``[MQTT-3.1.2-4] (5.0)``, and where both say the same under one id, ``[MQTT-3.1.2-3] (3.1.1, 5.0)``. The mark
  belongs to the ids right before it, on the same line; ``(3.1.1)`` may be written for clearness.
- In a test a citation stands in the function that proves the statement (docstring or comment), or in a table at
  module level that proving tests are parametrized with. Anywhere else it is a remark and proves nothing.
- A citation says that the test fails without the behaviour.
"""
