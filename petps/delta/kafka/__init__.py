"""The Kafka log (FORMAT.md): a delta log in one Kafka topic, through librdkafka.

Owns:        the topic and its creation, the producer's and the consumers' settings, what Kafka's
             errors mean.
Never does:  look into a message; let Kafka choose partitions, offsets or a reset; keep a position.
Called by:   publish and ingest through the contract in petps/delta/log.py.
Invariants:  one message of the log is one record of its partition, in order, written once; a
             position that Kafka cannot serve is Lost, never another position.
Threads:     as the contract says; librdkafka has threads of its own for the network.
"""

from petps.delta.kafka.log import KafkaLog
from petps.delta.kafka.options import SCHEME, KafkaAddress, parse_address

__all__ = ["SCHEME", "KafkaAddress", "KafkaLog", "parse_address"]
