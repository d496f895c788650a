package main

import (
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"

	"github.com/unecho/unecho/internal/migrate"
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
		TLS             string   `koanf:"tls"`
		CAFile          string   `koanf:"ca_file"`
		CertFile        string   `koanf:"cert_file"`
		KeyFile         string   `koanf:"key_file"`
		SASL            string   `koanf:"sasl"`
		Username        string   `koanf:"username"`
		PasswordFile    string   `koanf:"password_file"`
	} `koanf:"kafka"`
	NATS struct {
		URL         string `koanf:"url"`
		Credentials string `koanf:"credentials_file"`
		NKeyFile    string `koanf:"nkey_file"`
		CAFile      string `koanf:"ca_file"`
		CertFile    string `koanf:"cert_file"`
		KeyFile     string `koanf:"key_file"`
		TLSFirst    string `koanf:"tls_first"`
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
		StoreTimeout   time.Duration `koanf:"store_timeout"`
		Poll           time.Duration `koanf:"poll"`
		MaxPoll        time.Duration `koanf:"max_poll"`
		Grace          time.Duration `koanf:"grace"`
		Retain         time.Duration `koanf:"retain"`
	} `koanf:"relay"`
	Log struct {
		Level  string `koanf:"level"`
		Format string `koanf:"format"`
	} `koanf:"log"`

	set map[string]given
}

// load reads the configuration: defaults, file, environment, flags.
func load(fs *pflag.FlagSet, environ []string) (*config, error) {
	set, err := collect(fs, environ)
	if err == nil {
		var c *config
		if c, err = decode(set); err == nil {
			return c, nil
		}
	}
	return nil, &usageError{fmt.Errorf("configuration: %w", err)}
}

// decode makes a config of what was given for each key.
func decode(set map[string]given) (*config, error) {
	values := make(map[string]any)
	for _, s := range settings {
		g, ok := set[s.key]
		if !ok {
			continue
		}
		v, err := s.parse(g.value)
		if err != nil {
			return nil, fmt.Errorf("%s (%s): %w", s.key, g.source, err)
		}
		values[s.key] = v
	}
	k := koanf.New(".")
	if err := k.Load(confmap.Provider(values, "."), nil); err != nil {
		return nil, err
	}
	c := &config{set: set}
	err := k.UnmarshalWithConf("", c, koanf.UnmarshalConf{DecoderConfig: &mapstructure.DecoderConfig{Result: c, TagName: "koanf", ErrorUnused: true}})
	if err != nil {
		return nil, err
	}
	return c, c.check()
}

// check says what is wrong with values that each are of the right kind.
func (c *config) check() error {
	if c.Database.Schema != "" {
		if err := migrate.CheckName(c.Database.Schema); err != nil {
			return c.wrong("database.schema", err)
		}
	}
	for part := range strings.SplitSeq(c.NATS.URL, ",") {
		if part = strings.TrimSpace(part); !strings.Contains(part, "://") {
			part = "nats://" + part
		}
		u, err := url.Parse(part)
		if err != nil {
			return c.wrong("nats.url", errors.New("it is not a URL")) // whose text may hold a password
		}
		if _, secret := u.User.Password(); secret && c.set["nats.url"].layer == layerFlag {
			return c.wrong("nats.url", errors.New("every user of this machine can read a password in a flag; use the file, the environment or nats.credentials_file"))
		}
	}
	return nil
}

// wrong is an error about the value of a key.
func (c *config) wrong(key string, err error) error {
	return fmt.Errorf("%s (%s): %w", key, c.set[key].source, err)
}

// databaseURL returns the URL, from the later layer if both the URL and the
// file that holds it were given.
func (c *config) databaseURL() (text, key string, err error) {
	u, f := c.set["database.url"], c.set["database.url_file"]
	switch {
	case c.Database.URL != "" && c.Database.URLFile != "" && u.layer == f.layer:
		err = fmt.Errorf("database.url and database.url_file are both set (%s, %s)", u.source, f.source)
	case c.Database.URL != "" && (c.Database.URLFile == "" || u.layer > f.layer):
		return c.Database.URL, "database.url", nil
	case c.Database.URLFile != "":
		b, readErr := os.ReadFile(c.Database.URLFile)
		text, err = strings.TrimSpace(string(b)), readErr
		if err == nil && text == "" {
			err = errors.New("the file is empty")
		}
		if err == nil {
			return text, "database.url_file", nil
		}
		err = c.wrong("database.url_file", err)
	default:
		err = fmt.Errorf("database.url is not set; set it in the file, by %s, or by database.url_file", setting{key: "database.url"}.envName())
	}
	return "", "", &usageError{fmt.Errorf("configuration: %w", err)}
}

// checkBroker says whether the broker is named, which only run needs.
func (c *config) checkBroker() error {
	missing := ""
	switch c.Broker {
	case "":
		missing = "broker"
	case "kafka":
		if len(c.Kafka.Brokers) == 0 {
			missing = "kafka.brokers"
		}
	case "nats":
		if c.NATS.URL == "" {
			missing = "nats.url"
		}
	}
	if missing == "" {
		return nil
	}
	s := setting{key: missing}
	return &usageError{fmt.Errorf("configuration: %s is not set; set it in the file, by %s or by --%s", missing, s.envName(), s.flagName())}
}
