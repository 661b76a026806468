"""A real Kafka broker for tests: Apache Kafka in KRaft mode, one process on 127.0.0.1.

Maven downloads the artifacts (pom.xml). They are checked against the sums of jars.sha256 and kept
in .cache/kafka, so that only the first run needs a network. A broker has three listeners:
plaintext, SASL over TLS (PLAIN and SCRAM), and TLS with client certificates.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import time
import uuid
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from tests.ports import stable_port

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
CACHE: Final = ROOT / ".cache" / "kafka"
MAVEN_GOAL: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
DOWNLOAD_SECONDS_MAX: Final = 600
START_SECONDS_MAX: Final = 300  # after a kill the broker recovers its logs
START_TRIES: Final = 3  # another process may take a port between its choice and its use
JAVA_MAJOR_MIN: Final = 17
# Small and quick to start: a test's broker lives for seconds and holds megabytes.
JAVA_OPTIONS: Final = ("-Xms64m", "-Xmx320m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
USER: Final = "trainer"
PASSWORD: Final = "a-password-of-tests"


class NotAvailable(Exception):
    """This machine has no Java or cannot download the artifacts. Tests are skipped visibly."""


def java() -> str:
    """Return the path of java. Raises NotAvailable."""
    home = os.environ.get("JAVA_HOME")
    path = shutil.which("java") or (f"{home}/bin/java" if home else None)
    if path is None or not os.path.exists(path):
        raise NotAvailable("no java: install openjdk-17-jre-headless")
    process = subprocess.run([path, "-version"], capture_output=True, text=True, check=False)
    words = process.stderr.replace('"', " ").split()
    major = next((word.split(".")[0] for word in words if word[0].isdigit()), "0")
    if int(major) < JAVA_MAJOR_MIN:
        raise NotAvailable(f"{path} is Java {major}; {JAVA_MAJOR_MIN} or newer is needed")
    return path


def artifacts() -> Path:
    """Return the folder of jars, which is downloaded once. Raises NotAvailable."""
    sums = (HERE / "jars.sha256").read_text()
    folder = CACHE / hashlib.sha256(sums.encode()).hexdigest()[:16]
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _download(folder, sums)
    return folder


def _download(folder: Path, sums: str) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise NotAvailable("the broker's jars are not cached and Maven is missing: install maven")
    temporary = folder.with_suffix(".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    command = [maven, "-q", "-B", "-f", str(HERE / "pom.xml"), MAVEN_GOAL]
    command += [f"-DoutputDirectory={temporary}", "-DincludeScope=runtime"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=DOWNLOAD_SECONDS_MAX
        )
    except subprocess.TimeoutExpired:
        raise NotAvailable(f"no jars from Maven in {DOWNLOAD_SECONDS_MAX} s") from None
    if process.returncode != 0:
        raise NotAvailable(
            f"Maven could not download the broker's jars: {process.stdout[-300:].strip()}"
        )
    expected = {name: value for value, name in (line.split() for line in sums.splitlines())}
    actual = {path.name: _sha256(path) for path in temporary.glob("*.jar")}
    if actual != expected:  # fail, do not skip: the download has other bytes
        wrong = sorted(set(actual.items()) ^ set(expected.items()))
        raise RuntimeError(f"the broker's jars differ from those of jars.sha256: {wrong}")
    temporary.rename(folder)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _make_certificates(folder: Path) -> None:
    """Make a CA, a certificate of 127.0.0.1 for the broker, and one for a client."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=petps tests",
            "-days", "30")  # fmt: skip
    for name, subject in (("broker", "/CN=127.0.0.1"), ("client", "/CN=trainer")):
        openssl("req", "-x509", *key, "-keyout", f"{name}.key", "-out", f"{name}.pem",
                "-subj", subject, "-days", "30", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-addext", "subjectAltName=IP:127.0.0.1",
                "-addext", "basicConstraints=critical,CA:FALSE")  # fmt: skip
    key_and_certificate = (folder / "broker.key").read_text() + (folder / "broker.pem").read_text()
    (folder / "broker-both.pem").write_text(key_and_certificate)


class Broker:
    """One broker and its data. It can be stopped or killed, and restarted on the same ports."""

    def __init__(self, folder: Path, ports: tuple[int, int, int, int] | None = None) -> None:
        """Start a broker. ports: plaintext, SASL, TLS, controller (None: any free ones)."""
        self._folder = folder
        self._java = java()
        self._classpath = f"{artifacts()}/*"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        _make_certificates(folder)
        for tries_left in reversed(range(START_TRIES)):
            chosen = ports or tuple(stable_port() for _ in range(4))
            self._plain, self._sasl, self._tls, self._controller = chosen
            self._format()
            try:
                self.start()
                return
            except RuntimeError:
                if tries_left == 0:
                    raise

    @property
    def address(self) -> str:
        """Return host:port without encryption or password."""
        return f"127.0.0.1:{self._plain}"

    @property
    def sasl_address(self) -> str:
        """Return host:port of SASL over TLS."""
        return f"127.0.0.1:{self._sasl}"

    @property
    def tls_address(self) -> str:
        """Return host:port of TLS with client certificates."""
        return f"127.0.0.1:{self._tls}"

    def certificate(self, name: str) -> str:
        """Return the path of ca.pem, client.pem or client.key."""
        return str(self._folder / name)

    @property
    def data(self) -> Path:
        """Return the folder of the partitions' segments."""
        return self._folder / "data"

    def _format(self) -> None:
        shutil.rmtree(self.data, ignore_errors=True)
        (self._folder / "server.properties").write_text(self._properties())
        (self._folder / "log4j2.properties").write_text(_LOG4J)
        scram = f"SCRAM-SHA-512=[name={USER},password={PASSWORD}]"
        identity = uuid.uuid4().hex[:22]
        command = ["kafka.tools.StorageTool", "format", "-t", identity, "-c", "server.properties"]
        with self._run([*command, "--add-scram", scram]) as process:
            if process.wait(START_SECONDS_MAX) != 0:
                raise RuntimeError(f"the broker's folder could not be formatted: {self.log()}")

    def _properties(self) -> str:
        sasl = "org.apache.kafka.common.security"
        listeners = (
            f"PLAINTEXT://{self.address},SASL_SSL://{self.sasl_address},SSL://{self.tls_address}"
        )
        scram = f"{sasl}.scram.ScramLoginModule required;"
        plain = f'{sasl}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
        return f"""
process.roles=broker,controller
broker.session.timeout.ms=9000
broker.heartbeat.interval.ms=200
node.id=1
controller.quorum.voters=1@127.0.0.1:{self._controller}
controller.listener.names=CONTROLLER
listeners={listeners},CONTROLLER://127.0.0.1:{self._controller}
advertised.listeners={listeners}
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL
ssl.keystore.type=PEM
ssl.keystore.location={self._folder}/broker-both.pem
ssl.truststore.type=PEM
ssl.truststore.location={self._folder}/ca.pem
listener.name.ssl.ssl.client.auth=required
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512
listener.name.sasl_ssl.plain.sasl.jaas.config={plain}
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config={scram}
log.dirs={self.data}
auto.create.topics.enable=true
num.partitions=1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
log.cleaner.dedupe.buffer.size=2097152
log.retention.check.interval.ms=300
log.initial.task.delay.ms=300
file.delete.delay.ms=100
log.index.size.max.bytes=65536
num.network.threads=2
num.io.threads=2
background.threads=2
num.recovery.threads.per.data.dir=1
group.initial.rebalance.delay.ms=0
"""

    def _run(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = [self._java, *JAVA_OPTIONS, "-cp", self._classpath]
        command += ["-Dlog4j2.configurationFile=log4j2.properties", *arguments]
        with open(self._folder / "broker.log", "ab") as log:
            return subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)

    def start(self) -> None:
        """Start the process, and return when it answers on its plaintext port."""
        assert self._process is None
        self._process = self._run(["kafka.Kafka", "server.properties"])
        deadline = time.monotonic() + START_SECONDS_MAX
        client = AdminClient(
            {"bootstrap.servers": self.address, "log_level": 0, "reconnect.backoff.max.ms": 200}
        )
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(KafkaException):
                client.list_topics(timeout=0.5)
                return
        self.kill()
        raise RuntimeError(f"the broker did not start: {self.log()}")

    def stop(self) -> None:
        """Stop the broker as an operator would."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the broker with -9."""
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def restart(self) -> None:
        """Kill the broker with -9, then start it."""
        self.kill()
        self.start()

    def log(self) -> str:
        """Return the end of the broker's output."""
        return (self._folder / "broker.log").read_text(errors="replace")[-2000:]


_LOG4J: Final = """
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c %m%n
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
"""
