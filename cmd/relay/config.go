package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
)

// config is what the file holds.
type config struct {
	Database struct {
		// URL may hold a password, so there is no flag for it.
		URL     string `koanf:"url"`
		URLFile string `koanf:"url_file"`
		Schema  string `koanf:"schema"`
	} `koanf:"database"`
	Broker string `koanf:"broker"`
	Kafka  struct {
		Brokers         []string `koanf:"brokers"`
		MaxMessageBytes int      `koanf:"max_message_bytes"`
	} `koanf:"kafka"`
	NATS struct {
		URL         string `koanf:"url"`
		Credentials string `koanf:"credentials_file"`
	} `koanf:"nats"`
	Mode  string `koanf:"mode"`
	Relay struct {
		Batch          int           `koanf:"batch"`
		Lease          time.Duration `koanf:"lease"`
		MaxAttempts    int           `koanf:"max_attempts"`
		Backoff        time.Duration `koanf:"backoff"`
		MaxBackoff     time.Duration `koanf:"max_backoff"`
		OnParked       string        `koanf:"on_parked"`
		PublishTimeout time.Duration `koanf:"publish_timeout"`
		Poll           time.Duration `koanf:"poll"`
		MaxPoll        time.Duration `koanf:"max_poll"`
		Grace          time.Duration `koanf:"grace"`
		Retain         time.Duration `koanf:"retain"`
	} `koanf:"relay"`
	Log struct {
		Level  string `koanf:"level"`
		Format string `koanf:"format"`
	} `koanf:"log"`
}

// setting is one key of the configuration.
type setting struct {
	key, def, help string
	list, secret   bool
}

// settings are all keys, with their defaults and what --help says.
var settings = []setting{
	{key: "database.url", help: "PostgreSQL URL", secret: true},
	{key: "database.url_file", help: "file that holds the PostgreSQL URL"},
	{key: "database.schema", help: "schema of the outbox; empty is the search_path"},
	{key: "broker", help: "kafka or nats"},
	{key: "kafka.brokers", help: "addresses of Kafka brokers, comma-separated", list: true},
	{key: "kafka.max_message_bytes", def: "1048588", help: "the broker's message.max.bytes"},
	{key: "nats.url", help: "NATS URL"},
	{key: "nats.credentials_file", help: "NATS credentials file"},
	{key: "mode", def: "binary", help: "how CloudEvents are written: binary or structured"},
	{key: "relay.batch", def: "500", help: "rows published at once"},
	{key: "relay.lease", def: "3s", help: "how long a dead relay blocks the others"},
	{key: "relay.max_attempts", def: "10", help: "refusals by the broker after which a row is parked; -1 is no limit"},
	{key: "relay.backoff", def: "500ms", help: "wait before a refused row is tried again, doubled each time"},
	{key: "relay.max_backoff", def: "1m", help: "the longest such wait"},
	{key: "relay.on_parked", def: "block", help: "later rows of a parked row's key: block or skip"},
	{key: "relay.publish_timeout", def: "10s", help: "bound on the publish of one batch"},
	{key: "relay.poll", def: "10ms", help: "shortest wait between looks at an empty outbox"},
	{key: "relay.max_poll", def: "500ms", help: "longest wait between looks at an empty outbox"},
	{key: "relay.grace", def: "10s", help: "time to finish the batch in hand after SIGTERM"},
	{key: "relay.retain", def: "24h", help: "how long sent rows are kept; -1s is for ever"},
	{key: "log.level", def: "info", help: "debug, info, warn or error"},
	{key: "log.format", def: "json", help: "json or text"},
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

// load reads the configuration: defaults, file, environment, flags.
func load(fs *pflag.FlagSet, environ []string) (*config, error) {
	k := koanf.New(".")
	env := lookup(environ)
	path, _ := fs.GetString("config")
	if path == "" {
		path = env["CONFIG"]
	}
	layers := []func() error{
		func() error { return k.Load(confmap.Provider(defaults(), "."), nil) },
		func() error { return loadFile(k, path) },
		func() error { return loadEnv(k, env) },
		func() error { return loadFlags(k, fs) },
	}
	for _, layer := range layers {
		if err := layer(); err != nil {
			return nil, &usageError{fmt.Errorf("configuration: %w", err)}
		}
	}
	c := &config{}
	err := k.UnmarshalWithConf("", c, koanf.UnmarshalConf{DecoderConfig: &mapstructure.DecoderConfig{
		Result: c, TagName: "koanf", WeaklyTypedInput: true, ErrorUnused: true,
		DecodeHook: mapstructure.ComposeDecodeHookFunc(mapstructure.StringToTimeDurationHookFunc(), mapstructure.StringToSliceHookFunc(",")),
	}})
	if err == nil {
		err = c.check()
	}
	if err != nil {
		return nil, &usageError{fmt.Errorf("configuration: %w", err)}
	}
	return c, nil
}

func defaults() map[string]any {
	m := make(map[string]any)
	for _, s := range settings {
		if s.def != "" {
			m[s.key] = s.def
		}
	}
	return m
}

func loadFile(k *koanf.Koanf, path string) error {
	if path == "" {
		return nil
	}
	if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// lookup returns our variables without their prefix.
func lookup(environ []string) map[string]string {
	m := make(map[string]string)
	for _, e := range environ {
		if name, v, ok := strings.Cut(e, "="); ok && strings.HasPrefix(name, envPrefix) {
			m[strings.TrimPrefix(name, envPrefix)] = v
		}
	}
	return m
}

// loadEnv takes the variables, and refuses one that is no setting: a name with
// a slip would otherwise be a setting that does nothing.
func loadEnv(k *koanf.Koanf, env map[string]string) error {
	for name, v := range env {
		if name == "CONFIG" {
			continue
		}
		i := slices.IndexFunc(settings, func(s setting) bool { return s.envName() == envPrefix+name })
		if i < 0 {
			return fmt.Errorf("there is no setting for the environment variable %s%s", envPrefix, name)
		}
		if err := k.Set(settings[i].key, v); err != nil {
			return err
		}
	}
	return nil
}

func loadFlags(k *koanf.Koanf, fs *pflag.FlagSet) error {
	for _, s := range settings {
		f := fs.Lookup(s.flagName())
		if f == nil || !f.Changed {
			continue
		}
		if err := k.Set(s.key, f.Value.String()); err != nil {
			return err
		}
	}
	return nil
}

// check completes the configuration and says what is wrong with it.
func (c *config) check() error {
	if c.Database.URL == "" && c.Database.URLFile != "" {
		b, err := os.ReadFile(c.Database.URLFile)
		if err != nil {
			return fmt.Errorf("database.url_file: %w", err)
		}
		c.Database.URL = strings.TrimSpace(string(b))
	}
	if c.Database.URL == "" {
		return fmt.Errorf("database.url is not set (or database.url_file, or %s)", setting{key: "database.url"}.envName())
	}
	for _, choice := range []struct {
		key, value string
		allowed    []string
	}{
		{"mode", c.Mode, []string{"binary", "structured"}},
		{"relay.on_parked", c.Relay.OnParked, []string{"block", "skip"}},
		{"log.level", c.Log.Level, []string{"debug", "info", "warn", "error"}},
		{"log.format", c.Log.Format, []string{"json", "text"}},
	} {
		if !slices.Contains(choice.allowed, choice.value) {
			return fmt.Errorf("%s is %q, it must be one of %s", choice.key, choice.value, strings.Join(choice.allowed, ", "))
		}
	}
	return nil
}

// checkBroker says whether the broker is named, which only run needs.
func (c *config) checkBroker() error {
	var err error
	switch c.Broker {
	case "kafka":
		if len(c.Kafka.Brokers) == 0 {
			err = errors.New("kafka.brokers is not set")
		}
	case "nats":
		if c.NATS.URL == "" {
			err = errors.New("nats.url is not set")
		}
	default:
		err = fmt.Errorf("broker is %q, it must be kafka or nats", c.Broker)
	}
	if err != nil {
		return &usageError{fmt.Errorf("configuration: %w", err)}
	}
	return nil
}
