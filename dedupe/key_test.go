package dedupe

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
)

// B03: keys made of parts that a separator would run together are different
// keys, in their encoding, in their stored form and in their fingerprint.
func TestB03KeysNeverRunTogether(t *testing.T) {
	keys := []Key{
		{Consumer: "c", Source: "a", ID: "b:c"}, {Consumer: "c", Source: "a:b", ID: "c"},
		{Consumer: "c", Source: "a", ID: "b|c"}, {Consumer: "c", Source: "a|b", ID: "c"},
		{Consumer: "x", Source: "y", ID: "1"}, {Consumer: "xy", Source: "", ID: "1"}, {Tenant: "x", Consumer: "y", ID: "1"},
		{Consumer: "c", Source: "http://h/a", ID: "b"}, {Consumer: "c", Source: "http://h", ID: "/a/b"},
		{Tenant: "t", Consumer: "c", ID: "1"}, {Consumer: "c", Source: "t", ID: "1"},
		{Consumer: "c", ID: "é"}, {Consumer: "c", ID: "e\u0301"}, // NFC and NFD are not normalised
		{Consumer: "c", Source: "/lms", ID: "1"}, {Consumer: "c", Source: "/lms/", ID: "1"}, {Consumer: "c", Source: "/LMS", ID: "1"},
	}
	for i, a := range keys {
		for _, b := range keys[i+1:] {
			if bytes.Equal(a.Encode(), b.Encode()) || a.Stored() == b.Stored() || Fingerprint(a) == Fingerprint(b) {
				t.Errorf("%#v and %#v meet", a, b)
			}
		}
	}
}

// The stored form is on people's disks: these vectors must never change.
func TestStoredIsForEver(t *testing.T) {
	for _, v := range []struct {
		key  Key
		want string
	}{
		{Key{Consumer: "billing", Source: "/shop", ID: "42"}, "d9104111802fbc6920b9b21622605e28"},
		{Key{Tenant: "acme", Consumer: "billing", Source: "/shop", ID: "42"}, "96119f6b6cde8a5d8fa09e804ec12287"},
		{Key{Consumer: "billing", Source: "/shop", ID: "0195e5a2-7c3b-7def-8a01-0123456789ab"}, "0195e5a27c3b12919d6fca0982b3a182"},
		{Key{Consumer: "billing", Source: "/shop", ID: "01JQJT4Z1VEXV8M00H8NCRS6MH"}, "0195e5a27c3b5a13aedf6c1860001e56"},
		{Key{Consumer: "billing", Source: "kafka:orders", ID: "7@123456789"}, "0000075bcd157755d6deb32c99ccb3da"},
	} {
		got := v.key.Stored()
		if hex.EncodeToString(got[:]) != v.want {
			t.Errorf("%v is stored as %x, it was %s", v.key, got[:], v.want)
		}
	}
	if got := Fingerprint(Key{Consumer: "c", ID: "1"}, []byte("type"), []byte("body")); hex.EncodeToString(got[:]) != "1aa070f8350687a1fadd63e63d1ccb2916968c62892ec83a4864f4d0cb2acbf5" {
		t.Errorf("the fingerprint is %x", got)
	}
}

// The time that an id carries leads the stored form, so that keys of one time
// lie together; every part still makes a difference behind it.
func TestStoredBeginsWithTheTimeOfTheID(t *testing.T) {
	for id, ms := range map[string]string{
		"0195e5a2-7c3b-7def-8a01-0123456789ab": "0195e5a27c3b",
		"0195E5A2-7C3B-7DEF-8A01-0123456789AB": "0195e5a27c3b",
		"01ARZ3NDEKTSV4RRFFQ69G5FAV":           "01563e3ab5d3",
		"01arz3ndektsv4rrffq69g5fav":           "01563e3ab5d3",
	} {
		a, b := Key{Consumer: "a", ID: id}.Stored(), Key{Consumer: "b", ID: id}.Stored()
		if hex.EncodeToString(a[:6]) != ms || a == b {
			t.Errorf("%s is stored as %x and %x, want them to begin with %s and to differ", id, a, b, ms)
		}
	}
	for _, id := range []string{
		"0195e5a2-7c3b-4def-8a01-0123456789ab", // version 4
		"0195e5a2-7c3b-7def-ca01-0123456789ab", // another variant
		"0195e5a2-7c3b-7def-8a01-0123456789ag", // no digit
		"0195e5a27c3b-7def-8a01-0123456789ab00",
		"81ARZ3NDEKTSV4RRFFQ69G5FAV", // beyond 48 bits
		"01ARZ3NDEKTSV4RRFFQ69G5FAU", // U is no digit of a ULID
	} {
		if _, ok := leading(id); ok {
			t.Errorf("%s is taken for an id that carries a time", id)
		}
	}
}

// A position's offset leads the stored form; nothing that only looks like a
// position is taken for one.
func TestStoredBeginsWithTheOffset(t *testing.T) {
	k := Key{Consumer: "c", Source: "kafka:orders"}
	for _, offset := range []int64{0, 1, 255, 1 << 40} {
		k.ID = PositionID(3, offset)
		got := k.Stored()
		if lead := uint64(got[0])<<40 | uint64(got[1])<<32 | uint64(got[2])<<24 | uint64(got[3])<<16 | uint64(got[4])<<8 | uint64(got[5]); lead != uint64(offset) {
			t.Errorf("%s is stored as %v, want it to begin with the offset", k.ID, got)
		}
		if other := (Key{Consumer: "c", Source: "kafka:orders", ID: PositionID(4, offset)}).Stored(); other == got || other[0] != got[0] {
			t.Errorf("partitions 3 and 4 are stored as %v and %v", got, other)
		}
	}
	for _, id := range []string{"3@", "@3", "3@-1", "-3@1", "03@1", "3@01", "3@1 ", "+3@1", "a@b", "3@1@2", "3@99999999999999999999", "99999999999@1"} {
		if _, ok := leading(id); ok {
			t.Errorf("%q is taken for a position", id)
		}
	}
}

func TestValidateNamesThePart(t *testing.T) {
	good := Key{Consumer: "c", Source: "s", ID: "1"}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	long := strings.Repeat("x", MaxPart+1)
	for want, k := range map[string]Key{
		"consumer is empty": {ID: "1"},
		"id is empty":       {Consumer: "c"},
		"id begins":         {Consumer: "c", ID: " "},
		"id has":            {Consumer: "c", ID: "a\x00b"},
		"id is not":         {Consumer: "c", ID: "\xff"},
		"source begins":     {Consumer: "c", Source: "s ", ID: "1"},
		"source is":         {Consumer: "c", Source: long, ID: "1"},
		"tenant has":        {Tenant: "a\nb", Consumer: "c", ID: "1"},
		"consumer has":      {Consumer: "c\u0085d", ID: "1"},
	} {
		err := k.Validate()
		if !errors.Is(err, ErrInvalidKey) || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60v: %v, want one that says %q", k, err, want)
		}
	}
	if err := (Key{Consumer: "c", ID: long[1:]}).Validate(); err != nil {
		t.Errorf("an id of %d bytes: %v", MaxPart, err)
	}
}

// String is what ends up in logs.
func TestStringShowsNoSecrets(t *testing.T) {
	s := Key{Tenant: "SECRET1", Consumer: "billing", Source: "SECRET2", ID: "SECRET3"}.String()
	if strings.Contains(s, "SECRET") || !strings.HasPrefix(s, "billing/") {
		t.Errorf("%q", s)
	}
}

func TestFingerprintCoversIdentityAndParts(t *testing.T) {
	k := Key{Consumer: "c", ID: "1"}
	seen := map[[32]byte]string{}
	for name, fp := range map[string][32]byte{
		"one":           Fingerprint(k, []byte("ab"), []byte("c")),
		"moved border":  Fingerprint(k, []byte("a"), []byte("bc")),
		"one part":      Fingerprint(k, []byte("abc")),
		"a part more":   Fingerprint(k, []byte("ab"), []byte("c"), nil),
		"other event":   Fingerprint(Key{Consumer: "c", ID: "2"}, []byte("ab"), []byte("c")),
		"other content": Fingerprint(k, []byte("ab"), []byte("d")),
	} {
		if was, ok := seen[fp]; ok {
			t.Errorf("%s and %s meet", name, was)
		}
		seen[fp] = name
	}
	if Fingerprint(k, nil) != Fingerprint(k, []byte{}) {
		t.Error("nil and empty differ: a copy could become a conflict on its way through a broker that has no null")
	}
}

// Equal encodings if and only if equal parts.
func FuzzEncode(f *testing.F) {
	f.Add("", "c", "s", "1", "", "c", "s1", "")
	f.Add("t", "c", "s", "1", "t", "c", "s", "1")
	f.Fuzz(func(t *testing.T, t1, c1, s1, i1, t2, c2, s2, i2 string) {
		a, b := Key{t1, c1, s1, i1}, Key{t2, c2, s2, i2}
		if bytes.Equal(a.Encode(), b.Encode()) != (a == b) {
			t.Errorf("%#v and %#v", a, b)
		}
		if (a.Stored() == b.Stored()) != (a == b) {
			t.Errorf("%#v and %#v are stored alike", a, b)
		}
	})
}

// A derived id is the same at every run, and another one for every parent,
// operation and ordinal.
func TestDeriveIsForEver(t *testing.T) {
	k := Key{Consumer: "billing", Source: "/shop", ID: "42"}
	if got := Derive(k, "charge", 0); got != "e52b1b63-2c46-8373-b0a9-41cf9089634b" {
		t.Errorf("Derive gives %s", got)
	}
	seen := map[string]bool{}
	for _, id := range []string{
		Derive(k, "charge", 0), Derive(k, "charge", 1), Derive(k, "charge", -1), Derive(k, "charge0", 0), Derive(k, "", 0),
		Derive(Key{Consumer: "billing", Source: "/shop", ID: "43"}, "charge", 0),
	} {
		if seen[id] || len(id) != 36 || id[14] != '8' || strings.IndexByte("89ab", id[19]) < 0 {
			t.Errorf("%s occurs twice or is no UUID of version 8", id)
		}
		seen[id] = true
	}
}
