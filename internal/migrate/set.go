package migrate

import (
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strconv"
	"strings"
)

// Set is the versioned schema of one driver. It is immutable.
type Set struct {
	line   string
	schema string // unquoted; empty is whatever unqualified names mean
	mark   string // that quotes a name
	files  []file // files[i] leads to version i+1
}

type file struct{ name, sql string }

var (
	lineName = regexp.MustCompile(`^[a-z][a-z0-9/_-]{0,62}$`)
	fileName = regexp.MustCompile(`^([0-9]{4})_[a-z0-9_]+\.sql$`)
	hole     = regexp.MustCompile(`\{\{[^}]*\}\}`)
	holeName = regexp.MustCompile(`^\{\{[a-z][a-z0-9_]{0,62}\}\}$`)
)

// New reads the files of a line: NNNN_what.sql in the root of files, numbered
// from 0001 without a gap. In them {{name}} stands for the quoted name of a
// table in schema, or for the quoted name alone if schema is empty.
//
// line names the driver in the table of versions. An error means that the
// files are wrong, which is the driver's fault, or that schema cannot be a
// schema's name, which is the user's and matches [ErrName].
func New(line string, files fs.FS, schema string) (*Set, error) {
	return newSet(line, files, schema, `"`, CheckName)
}

// NewMySQL is New for MySQL and MariaDB, where the schema is a database that
// exists, names are quoted by backticks, and a file may be run again after it
// has failed half-way.
func NewMySQL(line string, files fs.FS, schema string) (*Set, error) {
	return newSet(line, files, schema, "`", CheckMySQLName)
}

func newSet(line string, files fs.FS, schema, mark string, check func(string) error) (*Set, error) {
	if !lineName.MatchString(line) {
		return nil, fmt.Errorf("migrate: the line's name %q does not match %v", line, lineName)
	}
	if schema != "" {
		if err := check(schema); err != nil {
			return nil, fmt.Errorf("migrate: the schema: %w", err)
		}
	}
	s := &Set{line: line, schema: schema, mark: mark}
	if err := s.read(files); err != nil {
		return nil, fmt.Errorf("migrate: %s: %w", line, err)
	}
	return s, nil
}

// MustNewMySQL is NewMySQL as [MustNew] is New.
func MustNewMySQL(line string, files fs.FS, schema string) *Set {
	s, err := NewMySQL(line, files, schema)
	if err != nil {
		panic(err)
	}
	return s
}

// MustNew is New for files that are embedded and a schema that was checked
// with [CheckName] before. It panics where New returns an error.
func MustNew(line string, files fs.FS, schema string) *Set {
	s, err := New(line, files, schema)
	if err != nil {
		panic(err)
	}
	return s
}

func (s *Set) read(files fs.FS) error {
	entries, err := fs.ReadDir(files, ".")
	if err != nil {
		return err
	}
	for _, e := range entries { // in the order of their names
		m := fileName.FindStringSubmatch(e.Name())
		if m == nil {
			return fmt.Errorf("the name of %s does not match %v", e.Name(), fileName)
		}
		if n, _ := strconv.Atoi(m[1]); n != len(s.files)+1 {
			return fmt.Errorf("%s stands where number %04d is due", e.Name(), len(s.files)+1)
		}
		text, err := fs.ReadFile(files, e.Name())
		if err != nil {
			return err
		}
		sql, err := s.render(string(text))
		if err != nil {
			return fmt.Errorf("%s: %w", e.Name(), err)
		}
		s.files = append(s.files, file{e.Name(), sql})
	}
	if len(s.files) == 0 {
		return errors.New("there are no files")
	}
	return nil
}

// render fills in the names of tables.
func (s *Set) render(text string) (string, error) {
	var bad string
	out := hole.ReplaceAllStringFunc(text, func(h string) string {
		if !holeName.MatchString(h) {
			bad = h
			return h
		}
		return s.Table(strings.Trim(h, "{}"))
	})
	if bad != "" {
		return "", fmt.Errorf("%s is not the name of a table", bad)
	}
	return strings.TrimSpace(out) + "\n", nil
}

// Table returns the quoted name of a table of the set's schema, as {{name}} in
// the files. name is a constant of the driver.
func (s *Set) Table(name string) string {
	if s.mark == `"` {
		return Table(s.schema, name)
	}
	if s.schema == "" {
		return s.mark + name + s.mark
	}
	return s.mark + s.schema + s.mark + "." + s.mark + name + s.mark
}

// SchemaSQL is an expression of MySQL for the name of the schema.
func (s *Set) SchemaSQL() string {
	if s.schema == "" {
		return "database()"
	}
	return "'" + s.schema + "'"
}

// Latest is the version that the program needs, 1 or more.
func (s *Set) Latest() int { return len(s.files) }

// ErrName: the name of a schema or table that cannot be one.
var ErrName = errors.New("not a usable SQL name")

// maxName is PostgreSQL's limit. A longer name is cut by the server without an
// error, and would meet another one.
const maxName = 63

// CheckName returns nil or an error that matches ErrName. Every name that can
// be quoted is allowed, but not those that mean something else in quotes than
// what was meant: empty, with a quote or a NUL, or longer than the server keeps.
func CheckName(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("%w: it is empty", ErrName)
	case len(name) > maxName:
		return fmt.Errorf("%w: it is %d bytes long, %d are allowed", ErrName, len(name), maxName)
	}
	for i, r := range name {
		if r == '"' || r == '\'' || r == '\\' || r < 0x20 || r == 0x7f || r == '\uFFFD' {
			return fmt.Errorf("%w: %q has %U at byte %d", ErrName, name, r, i)
		}
	}
	return nil
}

// CheckMySQLName is CheckName for MySQL: no backtick either, no space at the end,
// and nothing outside the basic plane.
func CheckMySQLName(name string) error {
	if err := CheckName(name); err != nil {
		return err
	}
	for i, r := range name {
		if r == '`' || r > 0xffff {
			return fmt.Errorf("%w: %q has %U at byte %d", ErrName, name, r, i)
		}
	}
	if strings.HasSuffix(name, " ") {
		return fmt.Errorf("%w: %q ends with a space", ErrName, name)
	}
	return nil
}

// Table returns the quoted name of a table, with the schema in front unless
// that is empty. Both names must have passed [CheckName].
func Table(schema, name string) string {
	if schema == "" {
		return quote(name)
	}
	return quote(schema) + "." + quote(name)
}

func quote(name string) string {
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}
