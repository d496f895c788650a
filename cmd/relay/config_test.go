package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// loaded reads the configuration from the text of a file, variables and flags.
func loaded(t *testing.T, yaml string, environ []string, args ...string) (*config, error) {
	t.Helper()
	fs := pflag.NewFlagSet("relay", pflag.ContinueOnError)
	addFlags(fs)
	if yaml != "" {
		args = append(args, "--config", write(t, "relay.yaml", yaml))
	}
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return load(fs, environ)
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// field returns the value of a key in c, found by the tags.
func field(t *testing.T, c *config, key string) string {
	t.Helper()
	v := reflect.ValueOf(*c)
	for part := range strings.SplitSeq(key, ".") {
		i := slices.IndexFunc(reflect.VisibleFields(v.Type()), func(f reflect.StructField) bool { return f.Tag.Get("koanf") == part })
		if i < 0 {
			t.Fatalf("config has no field for %s", key)
		}
		v = v.Field(i)
	}
	return fmt.Sprint(v.Interface())
}

// three are values for a key that can be told apart, as they are given and as
// they come out.
func three(s setting) (in, out [3]string) {
	switch {
	case s.kind == list:
		return [3]string{"a:1", "a:1,b:2", "c:3 , d:4"}, [3]string{"[a:1]", "[a:1 b:2]", "[c:3 d:4]"}
	case s.kind == positive || s.kind == positiveOrNone:
		in = [3]string{"11", "12", "13"}
		return in, in
	case s.kind == duration || s.kind == durationOrForever:
		return [3]string{"61s", "2m", "3h"}, [3]string{"1m1s", "2m0s", "3h0m0s"}
	case len(s.oneOf) > 0:
		in = [3]string{s.oneOf[0], s.oneOf[1], s.oneOf[0]}
		return in, in
	}
	in = [3]string{"x1", "x2", "x3"}
	return in, in
}

// Every key, from every layer, and each layer over the ones before it.
func TestPrecedence(t *testing.T) {
	for _, s := range settings {
		in, out := three(s)
		section, name, nested := strings.Cut(s.key, ".")
		yaml := section + ": " + in[0] + "\n"
		if nested {
			yaml = section + ":\n  " + name + ": " + in[0] + "\n"
		}
		env := []string{"HOME=/x", s.envName() + "=" + in[1]}
		flag := []string{"--" + s.flagName(), in[2]}
		if s.secret {
			flag = nil
		}
		def := s.def
		if d, err := time.ParseDuration(def); err == nil && (s.kind == duration || s.kind == durationOrForever) {
			def = d.String()
		}
		if s.kind == list {
			def = "[]"
		}
		for _, c := range []struct {
			name, yaml string
			env, flag  []string
			want       string
		}{
			{"default", "", nil, nil, def},
			{"file", yaml, nil, nil, out[0]},
			{"environment", "", env, nil, out[1]},
			{"environment over file", yaml, env, nil, out[1]},
			{"empty variable", yaml, []string{s.envName() + "="}, nil, out[0]},
			{"flag", "", nil, flag, out[2]},
			{"flag over file", yaml, nil, flag, out[2]},
			{"flag over environment", "", env, flag, out[2]},
			{"flag over all", yaml, env, flag, out[2]},
		} {
			if s.secret && strings.HasPrefix(c.name, "flag") {
				continue
			}
			got, err := loaded(t, c.yaml, c.env, c.flag...)
			if err != nil {
				t.Errorf("%s, %s: %v", s.key, c.name, err)
			} else if v := field(t, got, s.key); v != c.want {
				t.Errorf("%s, %s: %q, want %q", s.key, c.name, v, c.want)
			}
		}
	}
}

// Every field of config is a setting, and the other way round.
func TestSettingsAndConfigAgree(t *testing.T) {
	var walk func(typ reflect.Type, prefix string) []string
	walk = func(typ reflect.Type, prefix string) (keys []string) {
		for _, f := range reflect.VisibleFields(typ) {
			switch tag := f.Tag.Get("koanf"); {
			case tag == "":
			case f.Type.Kind() == reflect.Struct:
				keys = append(keys, walk(f.Type, prefix+tag+".")...)
			default:
				keys = append(keys, prefix+tag)
			}
		}
		return keys
	}
	var want []string
	for _, s := range settings {
		want = append(want, s.key)
	}
	got := walk(reflect.TypeFor[config](), "")
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("config has %q, settings are %q", got, want)
	}
}

func TestConfigFileIsNamedByTheEnvironment(t *testing.T) {
	a, b := write(t, "a.yaml", "relay: {batch: 7}"), write(t, "b.yaml", "relay: {batch: 8}\nkafka: {brokers: [x:1, 'y:2']}\nnats:\n")
	c, err := loaded(t, "", []string{"UNECHO_RELAY_CONFIG=" + a})
	if err != nil || c.Relay.Batch != 7 {
		t.Errorf("batch %v, %v", c, err)
	}
	c, err = loaded(t, "", []string{"UNECHO_RELAY_CONFIG=" + a}, "--config", b)
	if err != nil || c.Relay.Batch != 8 || !slices.Equal(c.Kafka.Brokers, []string{"x:1", "y:2"}) {
		t.Errorf("%v, %v", c, err)
	}
}

// runCommand runs a command line as main does, and returns what it printed.
func runCommand(ctx context.Context, environ []string, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = execute(ctx, environ, args, &out, &errs)
	return code, out.String(), errs.String()
}

// What makes no sense ends with exit code 2, and a text that names the key and
// who gave it.
func TestBadConfiguration(t *testing.T) {
	url := "UNECHO_RELAY_DATABASE_URL=postgres://x"
	file := func(text string) []string {
		return []string{url, "UNECHO_RELAY_CONFIG=" + write(t, "relay.yaml", text)}
	}
	env := func(name, v string) []string { return []string{url, "UNECHO_RELAY_" + name + "=" + v} }
	empty := write(t, "empty", "\n")
	for name, c := range map[string]struct {
		env  []string
		args []string
		says []string
	}{
		"unknown key":             {file("relay: {leese: 3s}"), nil, []string{"relay.leese", "relay.yaml"}},
		"unknown section":         {file("rely: {lease: 3s}"), nil, []string{"rely.lease", "relay.yaml"}},
		"section for a value":     {file("relay: 3"), nil, []string{`"relay"`, "relay.yaml"}},
		"value for a section":     {file("relay: {lease: {x: 3s}}"), nil, []string{"relay.lease.x", "relay.yaml"}},
		"no YAML":                 {file("a: b: c"), nil, []string{"relay.yaml", "mapping values"}},
		"no map":                  {file("just text"), nil, []string{"relay.yaml"}},
		"no file":                 {[]string{url}, []string{"--config", "/no/such"}, []string{"/no/such"}},
		"unknown variable":        {env("RELAY_LEESE", "3s"), nil, []string{"UNECHO_RELAY_RELAY_LEESE"}},
		"unknown flag":            {[]string{url}, []string{"--relay-leese=3s"}, []string{"--relay-leese"}},
		"bad duration in file":    {file("relay: {lease: 3}"), nil, []string{"relay.lease", "relay.yaml", `"3"`}},
		"bad duration in env":     {env("RELAY_GRACE", "soon"), nil, []string{"relay.grace", "UNECHO_RELAY_RELAY_GRACE", `"soon"`}},
		"bad duration in flag":    {[]string{url}, []string{"--relay-poll=-1s"}, []string{"relay.poll", "--relay-poll", `"-1s"`}},
		"retain nothing":          {[]string{url}, []string{"--relay-retain=0s"}, []string{"relay.retain", "-1s"}},
		"bad number":              {env("RELAY_BATCH", "0"), nil, []string{"relay.batch", "UNECHO_RELAY_RELAY_BATCH", `"0"`}},
		"no limit":                {env("RELAY_MAX_ATTEMPTS", "-2"), nil, []string{"relay.max_attempts", "or -1"}},
		"a list for a number":     {file("relay: {batch: [1]}"), nil, []string{"relay.batch", "relay.yaml", "single"}},
		"a number for a list":     {file("kafka: {brokers: 3}"), nil, []string{"kafka.brokers", "relay.yaml", "list"}},
		"empty part":              {env("KAFKA_BROKERS", "a:1,,b:1"), nil, []string{"kafka.brokers", "part 2"}},
		"bad choice in file":      {file("mode: bin"), nil, []string{"mode", "relay.yaml", `"bin"`, "binary, structured"}},
		"bad choice in env":       {env("LOG_LEVEL", "trace"), nil, []string{"log.level", "UNECHO_RELAY_LOG_LEVEL", "debug, info"}},
		"bad choice in flag":      {[]string{url}, []string{"--relay-on-parked", "drop"}, []string{"relay.on_parked", "--relay-on-parked", "block, skip"}},
		"bad broker":              {env("BROKER", "rabbit"), nil, []string{"broker", "UNECHO_RELAY_BROKER", "kafka, nats"}},
		"bad schema":              {[]string{url}, []string{"--database-schema", `a"; drop table x; --`}, []string{"database.schema", "--database-schema"}},
		"no database":             {[]string{"UNECHO_RELAY_BROKER=kafka", "UNECHO_RELAY_KAFKA_BROKERS=x:1"}, nil, []string{"database.url", "UNECHO_RELAY_DATABASE_URL"}},
		"two databases":           {env("DATABASE_URL_FILE", "/x"), []string{"--broker=nats", "--nats-url=x:1"}, []string{"database.url_file", "UNECHO_RELAY_DATABASE_URL,", "UNECHO_RELAY_DATABASE_URL_FILE"}},
		"no such database file":   {nil, []string{"--database-url-file=/no/such", "--broker=nats", "--nats-url=x:1"}, []string{"database.url_file", "--database-url-file", "/no/such"}},
		"empty database file":     {nil, []string{"--database-url-file=" + empty, "--broker=nats", "--nats-url=x:1"}, []string{"database.url_file", "empty"}},
		"bad database URL":        {[]string{"UNECHO_RELAY_DATABASE_URL=postgres://u:p@h:port/x"}, []string{"--broker=nats", "--nats-url=x:1"}, []string{"database.url", "UNECHO_RELAY_DATABASE_URL"}},
		"no broker":               {[]string{url}, nil, []string{"broker is not set", "UNECHO_RELAY_BROKER", "--broker"}},
		"no Kafka brokers":        {env("BROKER", "kafka"), nil, []string{"kafka.brokers is not set", "--kafka-brokers"}},
		"no NATS URL":             {env("BROKER", "nats"), nil, []string{"nats.url is not set", "--nats-url"}},
		"bad NATS URL":            {[]string{url}, []string{"--nats-url=nats://h:port"}, []string{"nats.url", "--nats-url"}},
		"password in a flag":      {[]string{url}, []string{"--nats-url=nats://u:canary@h:1"}, []string{"nats.url", "--nats-url", "password"}},
		"an argument":             {[]string{url}, []string{"now"}, []string{"now"}},
		"a flag for the database": {nil, []string{"--database-url=postgres://x"}, []string{"--database-url"}},
	} {
		code, stdout, stderr := runCommand(t.Context(), c.env, append([]string{"run"}, c.args...)...)
		if code != 2 || stdout != "" {
			t.Errorf("%s: exit code %d, stdout %q, stderr %q", name, code, stdout, stderr)
		}
		for _, s := range c.says {
			if !strings.Contains(stderr, s) {
				t.Errorf("%s: %q does not say %q", name, stderr, s)
			}
		}
		if strings.Contains(stderr, "canary") || strings.Count(stderr, "\n") > 2 {
			t.Errorf("%s: %q", name, stderr)
		}
	}
}

// The later layer wins between the URL and the file that holds it.
func TestDatabaseURL(t *testing.T) {
	url, path := "postgres://env", write(t, "url", " postgres://file \n")
	for name, c := range map[string]struct {
		yaml string
		env  []string
		args []string
		want string
	}{
		"url":                       {"", []string{"UNECHO_RELAY_DATABASE_URL=" + url}, nil, url},
		"file":                      {"", nil, []string{"--database-url-file", path}, "postgres://file"},
		"flag of the file wins":     {"", []string{"UNECHO_RELAY_DATABASE_URL=" + url}, []string{"--database-url-file", path}, "postgres://file"},
		"variable of the URL wins":  {"database: {url_file: /no/such}", []string{"UNECHO_RELAY_DATABASE_URL=" + url}, nil, url},
		"variable of the file wins": {"database: {url: x}", []string{"UNECHO_RELAY_DATABASE_URL_FILE=" + path}, nil, "postgres://file"},
	} {
		cfg, err := loaded(t, c.yaml, c.env, c.args...)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got, _, err := cfg.databaseURL(); got != c.want || err != nil {
			t.Errorf("%s: %q, %v, want %q", name, got, err, c.want)
		}
	}
}

func TestHelpListsEverything(t *testing.T) {
	code, stdout, stderr := runCommand(t.Context(), nil, "--help")
	if code != 0 || stderr != "" {
		t.Errorf("exit code %d, stderr %q", code, stderr)
	}
	for _, s := range settings {
		want := "--" + s.flagName() + " "
		if s.secret {
			want = s.envName()
			if strings.Contains(stdout, "--"+s.flagName()+" ") {
				t.Errorf("there is a flag for %s", s.key)
			}
		}
		if !strings.Contains(stdout, want) || !strings.Contains(stdout, s.help) || !strings.Contains(stdout, s.def) {
			t.Errorf("--help does not tell of %s", s.key)
		}
	}
	for _, want := range []string{"run ", "migrate ", "parked ", "keys ", "version ", "--config", envPrefix + "CONFIG", "Exit codes"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("--help does not tell of %q", want)
		}
	}
}

func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"", 2, "which command"},
		{"frobnicate", 2, "frobnicate"},
		{"parked", 2, "which command"},
		{"parked frobnicate", 2, "frobnicate"},
		{"parked requeue", 2, "at least one"},
		{"parked drop x", 2, `"x"`},
		{"parked list --limit 0", 2, "--limit"},
		{"migrate now", 2, "now"},
		{"keys", 2, "which command"},
		{"keys release", 2, "at least one key"},
		{"keys forget x", 2, `"x"`},
		{"keys show", 2, "--consumer and --id"},
		{"keys show a b", 2, "one key"},
		{"keys list", 2, "--state, or --in-conflict"},
		{"keys list --state lost", 2, `"lost"`},
		{"keys list --state done --in-conflict", 2, "--state, or --in-conflict"},
		{"keys list --help", 0, ""},
		{"version", 0, ""},
		{"--version", 0, ""},
		{"parked list --help", 0, ""},
	} {
		env := []string{"UNECHO_RELAY_DATABASE_URL=postgres://127.0.0.1:1/x"}
		code, stdout, stderr := runCommand(t.Context(), env, strings.Fields(c.args)...)
		if code != c.code || !strings.Contains(stderr, c.says) || (stdout != "") != (c.code == 0) {
			t.Errorf("relay %s: exit code %d, stdout %q, stderr %q", c.args, code, stdout, stderr)
		}
	}
}

func TestExitCodes(t *testing.T) {
	if got := exitCode(fmt.Errorf("a: %w", &usageError{errors.New("b")})); got != 2 {
		t.Errorf("usage: %d", got)
	}
	if got := exitCode(errors.New("b")); got != 1 {
		t.Errorf("failure: %d", got)
	}
}
