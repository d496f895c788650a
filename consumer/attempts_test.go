package consumer

import (
	"fmt"
	"testing"
)

func TestAttemptsAreBounded(t *testing.T) {
	a := newAttempts()
	for i := range maxRemembered + 10 {
		a.set(fmt.Sprint(i), history{failures: i + 1})
		a.set("0", history{failures: 7}) // in use, so never the oldest
	}
	if n := len(a.byPos); n != maxRemembered {
		t.Errorf("%d remembered, want %d", n, maxRemembered)
	}
	if a.get("0").failures != 7 || a.get("1").failures != 0 {
		t.Errorf("kept %d and %d, want the recent one only", a.get("0").failures, a.get("1").failures)
	}
	a.forget("0")
	if a.get("0").failures != 0 || a.recent.Len() != len(a.byPos) {
		t.Error("forget left something behind")
	}
}
