"""The Kafka log (FORMAT.md): a delta log in one Kafka topic, through librdkafka.

Owns:        the topic and its creation, the settings of the producer and the consumers, and the
             mapping of Kafka's errors to those of petps.
Never does:  read the content of a message; let Kafka choose partitions, offsets or a reset; store a
             position.
Called by:   publish and ingest through the contract in petps/delta/log.py.
Invariants:  One message of the log is one record of its partition, in order, written once. A
             position that Kafka cannot serve is Lost; it is never replaced by another position.
Threads:     as in the contract; librdkafka has its own threads for the network.
"""

from petps.delta.kafka.log import KafkaLog
from petps.delta.kafka.options import KafkaAddress, parse_address

__all__ = ["KafkaAddress", "KafkaLog", "parse_address"]
