package consumertest_test

import (
	"testing"

	"go.uber.org/goleak"
)

// No test may leave a goroutine behind: what is started here is waited for.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
