package memdedupe_test

import (
	"testing"

	"github.com/unecho/unecho/dedupe/internal/memharness"
	"github.com/unecho/unecho/dedupe/storetest"
)

func TestConformance(t *testing.T) { storetest.Run(t, memharness.Open) }
