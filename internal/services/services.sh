#!/usr/bin/env bash
# Real servers for the tests: PostgreSQL, Redis, NATS with JetStream, Apache Kafka, MariaDB; and PgBouncer,
# which the tests start themselves.
#
#   services.sh up       install what is missing, start what is not running, write .services/env
#   services.sh stop     stop them, keep their data
#   services.sh status   one line each
#   services.sh reset    stop, wipe the data, up
#   services.sh env      print the env file
#
# Everything lives in .services/ of the checkout, on private ports of 127.0.0.1 that are chosen once.
# A service whose address is already in the environment (UNECHO_POSTGRES_URL, UNECHO_REDIS_ADDR,
# UNECHO_NATS_URL, UNECHO_KAFKA_BROKERS, UNECHO_MARIADB_DSN) is used as it is and never started or stopped.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
dir=$root/.services
env=$dir/env
given_postgres=${UNECHO_POSTGRES_URL-} given_redis=${UNECHO_REDIS_ADDR-}
given_nats=${UNECHO_NATS_URL-} given_kafka=${UNECHO_KAFKA_BROKERS-} given_mariadb=${UNECHO_MARIADB_DSN-}

say() { printf '%s\n' "$*"; }
die() { printf 'services: %s\n' "$*" >&2; exit 1; }
have() { command -v "$1" >/dev/null 2>&1; }
as_root() { [ "$(id -u)" = 0 ]; }

# ---- installing -----------------------------------------------------------------------------------

# need COMMAND PACKAGE: install the Debian package unless the command is there.
need() {
	have "$1" && return
	as_root || die "'$1' is missing: install the Debian package '$2' (as root: apt-get install $2)"
	have apt-get || die "'$1' is missing and there is no apt-get: install it, or give the service's address in the environment (see compose.yaml)"
	[ -e "$dir/.apt-updated" ] || { apt-get update -qq; touch "$dir/.apt-updated"; }
	say "services: installing $2"
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >"$dir/log/apt-$2.log" 2>&1 ||
		die "apt-get install $2 failed, see $dir/log/apt-$2.log"
}

# The newest PostgreSQL of the machine; its programs are not on the PATH on Debian.
pg_bin() {
	local newest
	newest=$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -1)
	if [ -n "$newest" ] && [ -x "$newest/initdb" ]; then say "$newest"; return; fi
	have initdb && dirname "$(command -v initdb)"
}

install_all() {
	need gcc build-essential # the race detector links with it
	if [ -z "$given_postgres" ] && [ -z "$(pg_bin)" ]; then need initdb postgresql; fi
	[ -n "$given_redis" ] || need redis-server redis-server
	[ -n "$given_mariadb" ] || need mariadbd mariadb-server
	need pgbouncer pgbouncer
	nats_server=$dir/bin/nats-server-$(cd "$root" && go list -m -f '{{.Version}}' github.com/nats-io/nats-server/v2)
	if [ ! -x "$nats_server" ]; then # the tests start servers of their own with it, too
		say "services: building nats-server"
		(cd "$root" && go build -o "$nats_server" github.com/nats-io/nats-server/v2)
	fi
	# Also for a Kafka that was given, if that is possible: some tests kill a broker of their own.
	if [ ! -e "$dir/kafka/libs/.complete" ] && { [ -z "$given_kafka" ] || { have java && have mvn; }; }; then
		need java default-jre-headless
		need mvn maven
		say "services: fetching Apache Kafka"
		mvn -q -B -f "$here/kafka/pom.xml" dependency:copy-dependencies -DincludeScope=runtime \
			-DoutputDirectory="$dir/kafka/libs" >"$dir/log/mvn.log" 2>&1 || die "maven failed, see $dir/log/mvn.log"
		touch "$dir/kafka/libs/.complete"
	fi
	if [ ! -x "$dir/bin/probe" ] || [ "$here/probe/main.go" -nt "$dir/bin/probe" ]; then
		(cd "$root" && go build -o "$dir/bin/probe" ./internal/services/probe)
	fi
}

# ---- ports and the env file -----------------------------------------------------------------------

# Ports are chosen when the env file is first written, and stay.
choose_ports() {
	local name
	for name in PG REDIS NATS KAFKA CONTROLLER MARIADB; do
		grep -qs "^PORT_$name=" "$dir/ports" || say "PORT_$name=$("$dir/bin/probe" ports 1)" >>"$dir/ports"
	done
}

write_env() {
	local url=${given_postgres:-postgres://unecho@127.0.0.1:$PORT_PG/unecho?sslmode=disable}
	cat >"$env.new" <<-END
		UNECHO_POSTGRES_URL='$url'
		UNECHO_REDIS_ADDR='${given_redis:-127.0.0.1:$PORT_REDIS}'
		UNECHO_NATS_URL='${given_nats:-nats://127.0.0.1:$PORT_NATS}'
		UNECHO_KAFKA_BROKERS='${given_kafka:-127.0.0.1:$PORT_KAFKA}'
		UNECHO_MARIADB_DSN='${given_mariadb:-root@tcp(127.0.0.1:$PORT_MARIADB)/}'
		UNECHO_PGBOUNCER='$(command -v pgbouncer || true)'
		UNECHO_PG_BIN='$(pg_bin || true)'
		UNECHO_REDIS_SERVER='$(command -v redis-server || true)'
		UNECHO_NATS_SERVER='$nats_server'
		UNECHO_KAFKA_LIBS='$dir/kafka/libs'
		END
	mv "$env.new" "$env"
}

# ---- PostgreSQL -----------------------------------------------------------------------------------

# PostgreSQL refuses to run as root: as root it runs as the user postgres, in a folder which that user
# can reach, or in one below the temporary folder if the checkout is not such a place.
pg_home() {
	if as_root && ! runuser -u postgres -- test -x "$dir" 2>/dev/null; then
		say "${TMPDIR:-/tmp}/unecho-pg-$(id -u)-$(printf %s "$root" | cksum | cut -d' ' -f1)"
	else
		say "$dir/pg"
	fi
}
pg_run() { if as_root; then (cd / && runuser -u postgres -- "$@"); else "$@"; fi; }

start_postgres() {
	local bin home
	bin=$(pg_bin) home=$(pg_home)
	pg_run "$bin/pg_ctl" -D "$home/data" status >/dev/null 2>&1 && return
	if [ ! -e "$home/data/PG_VERSION" ]; then
		mkdir -p "$home"
		if as_root; then chown postgres "$home"; fi
		pg_run "$bin/initdb" -D "$home/data" -U unecho --auth=trust -E UTF8 --locale=C --no-sync >"$dir/log/initdb.log" 2>&1 ||
			die "initdb failed, see $dir/log/initdb.log"
		pg_run tee -a "$home/data/postgresql.conf" >/dev/null <<-END
			listen_addresses = '127.0.0.1'
			port = $PORT_PG
			unix_socket_directories = '$home'
			max_connections = 300
			wal_level = logical
			max_prepared_transactions = 20
			log_lock_waits = on
			fsync = on
			synchronous_commit = on
			END
	fi
	pg_run "$bin/pg_ctl" -D "$home/data" -l "$home/log" -w -t 60 start >/dev/null || die "PostgreSQL does not start, see $home/log"
	pg_run "$bin/createdb" -h 127.0.0.1 -p "$PORT_PG" -U unecho unecho >/dev/null 2>&1 || true
}
stop_postgres() {
	local bin; bin=$(pg_bin) || return 0
	pg_run "$bin/pg_ctl" -D "$(pg_home)/data" -m fast -w stop >/dev/null 2>&1 || true
}

# ---- MariaDB --------------------------------------------------------------------------------------

# MariaDB runs as the user mysql when it is started as root, and needs a folder that this user can reach.
maria_home() {
	if as_root && ! runuser -u mysql -- test -x "$dir" 2>/dev/null; then
		say "${TMPDIR:-/tmp}/unecho-maria-$(id -u)-$(printf %s "$root" | cksum | cut -d' ' -f1)"
	else
		say "$dir/mariadb"
	fi
}
start_mariadb() {
	alive mariadb && return
	local home user=()
	home=$(maria_home)
	mkdir -p "$home"
	if as_root; then chown mysql "$home"; user=(--user=mysql); fi
	if [ ! -e "$home/data/mysql" ]; then
		rm -rf "$home/data"
		mariadb-install-db --no-defaults "${user[@]}" --datadir="$home/data" --auth-root-authentication-method=normal --skip-test-db >"$dir/log/mariadb-install.log" 2>&1 ||
			die "mariadb-install-db failed, see $dir/log/mariadb-install.log"
	fi
	spawn mariadb mariadbd --no-defaults "${user[@]}" --datadir="$home/data" --port="$PORT_MARIADB" --bind-address=127.0.0.1 \
		--socket="$home/sock" --pid-file="$home/pid" --innodb-flush-log-at-trx-commit=1 --max-connections=300
}

# ---- the others: plain processes with a pid file ---------------------------------------------------

alive() { [ -s "$dir/$1.pid" ] && kill -0 "$(cat "$dir/$1.pid")" 2>/dev/null; }
# spawn NAME COMMAND...: in a session of its own, so that it outlives this shell.
spawn() {
	local name=$1; shift
	setsid nohup "$@" >>"$dir/log/$name.log" 2>&1 </dev/null &
	echo $! >"$dir/$name.pid"
}
stop_one() {
	alive "$1" || { rm -f "$dir/$1.pid"; return 0; }
	local pid; pid=$(cat "$dir/$1.pid")
	kill "$pid" 2>/dev/null || true
	for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
	kill -9 "$pid" 2>/dev/null || true
	rm -f "$dir/$1.pid"
}

start_redis() {
	alive redis && return
	mkdir -p "$dir/redis"
	spawn redis redis-server --port "$PORT_REDIS" --bind 127.0.0.1 --dir "$dir/redis" --appendonly yes \
		--appendfsync everysec --maxmemory-policy noeviction --daemonize no
}

start_nats() {
	alive nats && return
	mkdir -p "$dir/nats"
	cat >"$dir/nats/nats.conf" <<-END
		listen: "127.0.0.1:$PORT_NATS"
		server_name: unecho
		jetstream { store_dir: "$dir/nats/data", max_mem: 256M, max_file: 8G, sync_interval: always }
		END
	spawn nats "$nats_server" -c "$dir/nats/nats.conf"
}

start_kafka() {
	alive kafka && return
	local k=$dir/kafka
	if [ ! -e "$k/data/meta.properties" ]; then
		rm -rf "$k/data"
		"$here/kafka/config.sh" "$k/data" 127.0.0.1 "$PORT_KAFKA" "$PORT_CONTROLLER" "$k/server.properties" "$k/log4j2.properties"
		local id; id=$(java -cp "$k/libs/*" kafka.tools.StorageTool random-uuid 2>/dev/null | tail -1)
		java -cp "$k/libs/*" kafka.tools.StorageTool format -t "$id" -c "$k/server.properties" >"$dir/log/kafka-format.log" 2>&1 ||
			die "formatting Kafka's storage failed, see $dir/log/kafka-format.log"
	fi
	spawn kafka java -Xms256m -Xmx512m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 \
		"-Dlog4j2.configurationFile=$k/log4j2.properties" -cp "$k/libs/*" kafka.Kafka "$k/server.properties"
}

# ---- the verbs --------------------------------------------------------------------------------------

up() {
	mkdir -p "$dir/log" "$dir/bin"
	install_all
	choose_ports
	# shellcheck disable=SC1091
	. "$dir/ports"
	[ -n "$given_kafka" ] || start_kafka # the slowest first
	[ -n "$given_postgres" ] || start_postgres
	[ -n "$given_redis" ] || start_redis
	[ -n "$given_nats" ] || start_nats
	[ -n "$given_mariadb" ] || start_mariadb
	write_env
	set -a
	# shellcheck disable=SC1090
	. "$env"
	set +a
	"$dir/bin/probe" ready || die "not all services are ready; logs are in $dir/log and $(pg_home)/log"
}

stop() {
	[ -n "$given_kafka" ] || stop_one kafka
	[ -n "$given_nats" ] || stop_one nats
	[ -n "$given_redis" ] || stop_one redis
	[ -n "$given_mariadb" ] || stop_one mariadb
	[ -n "$given_postgres" ] || stop_postgres
}

status() {
	[ -e "$env" ] || die "nothing was started here yet: make services"
	set -a
	# shellcheck disable=SC1090
	. "$env"
	set +a
	"$dir/bin/probe" status
}

reset() {
	stop
	local home; home=$(pg_home)
	rm -rf "${home:?}/data" "$(maria_home)/data" "$dir/redis" "$dir/nats" "$dir/kafka/data" "$dir/env"
	up
}

case ${1-} in
up | stop | status | reset) "$1" ;;
env) cat "$env" ;;
*) die "usage: services.sh up|stop|status|reset|env" ;;
esac
