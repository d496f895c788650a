#!/usr/bin/env bash
# config.sh DATA HOST PORT CONTROLLER_PORT SERVER_PROPERTIES LOG4J_PROPERTIES: write the configuration of one
# combined KRaft node. Shared by services.sh and by the tests that kill a broker of their own. A node of a cluster has a
# NODE_ID, the VOTERS and the REPLICAS of internal topics in its environment.
set -euo pipefail
NODE_ID=${NODE_ID:-1}
VOTERS=${VOTERS:-$NODE_ID@$2:$4}
REPLICAS=${REPLICAS:-1}
cat >"$5" <<END
process.roles=broker,controller
node.id=$NODE_ID
controller.quorum.voters=$VOTERS
listeners=PLAINTEXT://$2:$3,CONTROLLER://$2:$4
advertised.listeners=PLAINTEXT://$2:$3
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs=$1
auto.create.topics.enable=false
log.cleaner.backoff.ms=200
group.initial.rebalance.delay.ms=0
offsets.topic.num.partitions=4
offsets.topic.replication.factor=$REPLICAS
transaction.state.log.replication.factor=$REPLICAS
transaction.state.log.min.isr=$((REPLICAS - REPLICAS / 3))
share.coordinator.state.topic.replication.factor=$REPLICAS
share.coordinator.state.topic.min.isr=$((REPLICAS - REPLICAS / 3))
# After a crash the node stays fenced until its old registration has expired: 9 s by default.
broker.session.timeout.ms=1500
broker.heartbeat.interval.ms=300
END
cat >"$6" <<END
rootLogger.level=WARN
rootLogger.appenderRef.console.ref=console
appender.console.type=Console
appender.console.name=console
appender.console.layout.type=PatternLayout
appender.console.layout.pattern=%d %p %c{1} %m%n
END
