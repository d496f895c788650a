package main

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

// setting is one key of the configuration.
type setting struct {
	key, def, help string
	kind           kind
	oneOf          []string // for text
	secret         bool
}

// kind is what a value may be.
type kind int

const (
	text kind = iota
	list
	positive          // a number, 1 or more
	positiveOrNone    // or -1
	duration          // more than nothing
	durationOrForever // or negative
)

// settings are all keys, with their defaults and what --help says.
var settings = []setting{
	{key: "database.url", help: "PostgreSQL URL", secret: true},
	{key: "database.url_file", help: "file that holds the PostgreSQL URL"},
	{key: "database.schema", help: "schema of the outbox; empty is the search_path"},
	{key: "broker", help: "kafka or nats", oneOf: []string{"kafka", "nats"}},
	{key: "kafka.brokers", help: "addresses of Kafka brokers, comma-separated", kind: list},
	{key: "kafka.max_message_bytes", def: "1048588", help: "the broker's message.max.bytes", kind: positive},
	{key: "kafka.tls", def: "off", help: "on: connect by TLS; also if kafka.ca_file or kafka.cert_file is set", oneOf: []string{"on", "off"}},
	{key: "kafka.ca_file", help: "PEM file with the authorities that sign the brokers' certificates; empty is the system's"},
	{key: "kafka.cert_file", help: "PEM file with the client's certificate"},
	{key: "kafka.key_file", help: "PEM file with its key"},
	{key: "kafka.sasl", def: "none", help: "none, plain (by TLS only), scram-sha-256 or scram-sha-512", oneOf: []string{"none", "plain", "scram-sha-256", "scram-sha-512"}},
	{key: "kafka.username", help: "name for SASL"},
	{key: "kafka.password_file", help: "file that holds the password for SASL"},
	{key: "nats.url", help: "NATS URL"},
	{key: "nats.credentials_file", help: "NATS credentials file"},
	{key: "nats.nkey_file", help: "file that holds an NKEY seed"},
	{key: "nats.ca_file", help: "PEM file with the authorities that sign the servers' certificates; empty is the system's"},
	{key: "nats.cert_file", help: "PEM file with the client's certificate"},
	{key: "nats.key_file", help: "PEM file with its key"},
	{key: "nats.tls_first", def: "off", help: "on: the TLS handshake comes before the server's greeting", oneOf: []string{"on", "off"}},
	{key: "mode", def: "binary", help: "how CloudEvents are written: binary or structured", oneOf: []string{"binary", "structured"}},
	{key: "relay.batch", def: "500", help: "rows published at once", kind: positive},
	{key: "relay.lease", def: "3s", help: "how long a dead relay blocks the others", kind: duration},
	{key: "relay.max_attempts", def: "10", help: "refusals by the broker after which a row is parked; -1 is no limit", kind: positiveOrNone},
	{key: "relay.backoff", def: "500ms", help: "wait before a refused row is tried again, doubled each time", kind: duration},
	{key: "relay.max_backoff", def: "1m", help: "the longest such wait", kind: duration},
	{key: "relay.on_parked", def: "block", help: "later rows of a parked row's key: block or skip", oneOf: []string{"block", "skip"}},
	{key: "relay.publish_timeout", def: "10s", help: "bound on the publish of one batch", kind: duration},
	{key: "relay.store_timeout", def: "30s", help: "bound on each call of the database", kind: duration},
	{key: "relay.poll", def: "10ms", help: "shortest wait between looks at an empty outbox", kind: duration},
	{key: "relay.max_poll", def: "500ms", help: "longest wait between looks at an empty outbox; at most a quarter of relay.lease", kind: duration},
	{key: "relay.grace", def: "10s", help: "time to finish the batch in hand after SIGTERM", kind: duration},
	{key: "relay.retain", def: "24h", help: "how long sent rows are kept, from when they were written; -1s is for ever", kind: durationOrForever},
	{key: "log.level", def: "info", help: "debug, info, warn or error", oneOf: []string{"debug", "info", "warn", "error"}},
	{key: "log.format", def: "json", help: "json or text", oneOf: []string{"json", "text"}},
}

// flagName is the flag of a key: kafka.max_message_bytes is
// --kafka-max-message-bytes.
func (s setting) flagName() string { return strings.NewReplacer(".", "-", "_", "-").Replace(s.key) }

// envName is the variable of a key: kafka.max_message_bytes is
// UNECHO_RELAY_KAFKA_MAX_MESSAGE_BYTES.
func (s setting) envName() string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(s.key, ".", "_"))
}

const envPrefix = "UNECHO_RELAY_"

// addFlags declares a flag for every key that is no secret, and --config.
func addFlags(fs *pflag.FlagSet) {
	fs.String("config", "", "YAML file with the settings; also "+envPrefix+"CONFIG")
	for _, s := range settings {
		if s.secret {
			continue
		}
		help := s.help
		if s.def != "" {
			help += " (default " + s.def + ")"
		}
		fs.String(s.flagName(), "", help)
	}
}

// parse returns the value of the right type. The text of an error never has
// the value of a secret.
func (s setting) parse(v any) (any, error) {
	if s.kind == list {
		return parseList(v)
	}
	switch v.(type) {
	case string, int, int64, uint64, float64, bool:
	default:
		return nil, errors.New("it must be a single value")
	}
	str := strings.TrimSpace(fmt.Sprint(v))
	switch s.kind {
	case positive, positiveOrNone:
		n, err := strconv.Atoi(str)
		if err != nil || n < 1 && (s.kind == positive || n != -1) {
			return nil, fmt.Errorf("%q is not a number from 1 on%s", str, map[kind]string{positiveOrNone: ", or -1"}[s.kind])
		}
		return n, nil
	case duration, durationOrForever:
		d, err := time.ParseDuration(str)
		if err != nil || d == 0 || d < 0 && s.kind == duration {
			return nil, fmt.Errorf("%q is not a duration such as 1m30s, and more than 0%s", str, map[kind]string{durationOrForever: ", or -1s"}[s.kind])
		}
		return d, nil
	}
	if len(s.oneOf) > 0 && !slices.Contains(s.oneOf, str) {
		return nil, fmt.Errorf("%q is not one of %s", str, strings.Join(s.oneOf, ", "))
	}
	return str, nil
}

func parseList(v any) ([]string, error) {
	var parts []string
	switch v := v.(type) {
	case string:
		parts = strings.Split(v, ",")
	case []any:
		for _, p := range v {
			str, ok := p.(string)
			if !ok {
				return nil, fmt.Errorf("%v is not text", p)
			}
			parts = append(parts, str)
		}
	default:
		return nil, errors.New("it must be a list")
	}
	for i, p := range parts {
		if parts[i] = strings.TrimSpace(p); parts[i] == "" {
			return nil, fmt.Errorf("part %d of the list is empty", i+1)
		}
	}
	return parts, nil
}

// layer is where a value comes from; the later ones win.
type layer int

const (
	layerDefault layer = iota
	layerFile
	layerEnv
	layerFlag
)

// given is the value of a key as somebody gave it.
type given struct {
	value  any
	source string // for people
	layer  layer
}

// collect returns what was given for each key, by the last layer that did.
func collect(fs *pflag.FlagSet, environ []string) (map[string]given, error) {
	set := make(map[string]given)
	for _, s := range settings {
		if s.def != "" {
			set[s.key] = given{s.def, "default", layerDefault}
		}
	}
	env := lookup(environ)
	path, _ := fs.GetString("config")
	if path == "" {
		path = env["CONFIG"]
	}
	if err := collectFile(set, path); err != nil {
		return nil, err
	}
	if err := collectEnv(set, env); err != nil {
		return nil, err
	}
	for _, s := range settings {
		if f := fs.Lookup(s.flagName()); f != nil && f.Changed {
			set[s.key] = given{f.Value.String(), "flag --" + s.flagName(), layerFlag}
		}
	}
	return set, nil
}

func collectFile(set map[string]given, path string) error {
	if path == "" {
		return nil
	}
	k := koanf.New(".")
	if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
		return fmt.Errorf("file %s: %w", path, withoutValues(err))
	}
	for key, v := range k.All() {
		switch {
		case v == nil: // a key or a section without a value
		case slices.ContainsFunc(settings, func(s setting) bool { return s.key == key }):
			set[key] = given{v, "file " + path, layerFile}
		default:
			return fmt.Errorf("file %s: there is no setting %q", path, key)
		}
	}
	return nil
}

// withoutValues cuts what the parser quotes from the file, which may be a
// password that stands in the wrong place.
func withoutValues(err error) error {
	if before, _, cut := strings.Cut(err.Error(), "`"); cut {
		return errors.New(strings.TrimSpace(before) + " …: not the YAML of settings")
	}
	return err
}

// lookup returns our variables without their prefix. One that is empty counts
// as not set.
func lookup(environ []string) map[string]string {
	m := make(map[string]string)
	for _, e := range environ {
		if name, v, ok := strings.Cut(e, "="); ok && v != "" && strings.HasPrefix(name, envPrefix) {
			m[strings.TrimPrefix(name, envPrefix)] = v
		}
	}
	return m
}

// collectEnv takes the variables, and refuses one that is no setting: a name
// with a slip would otherwise be a setting that does nothing.
func collectEnv(set map[string]given, env map[string]string) error {
	for name, v := range env {
		if name == "CONFIG" {
			continue
		}
		i := slices.IndexFunc(settings, func(s setting) bool { return s.envName() == envPrefix+name })
		if i < 0 {
			return fmt.Errorf("there is no setting for the environment variable %s%s", envPrefix, name)
		}
		set[settings[i].key] = given{v, "environment variable " + envPrefix + name, layerEnv}
	}
	return nil
}
