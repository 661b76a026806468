// The programs of the chaos suite (tools.py): the switch, and the checker of histories.
module petps.tests/chaos

go 1.25.0

require github.com/anishathalye/porcupine v1.3.1
