package envelope_test

import (
	"errors"
	"fmt"
	"time"

	"github.com/unecho/unecho/envelope"
)

// order is an event that a producer wants to publish.
func order() *envelope.Message {
	return &envelope.Message{
		ID: "order 7/1", Source: "/shop", Type: "com.example.order.placed",
		ContentType: "application/json", Topic: "orders", Key: []byte("7"), Body: []byte(`{"total":100}`),
		Time: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
	}
}

func ExampleBinding_Encode() {
	for _, b := range []envelope.Binding{envelope.Kafka, envelope.NATS} {
		m, err := b.Encode(order(), envelope.Binary)
		if err != nil {
			fmt.Println(err)
			return
		}
		for _, f := range m.Header {
			fmt.Printf("%s: %s\n", f.Name, f.Value)
		}
		fmt.Printf("%s\n\n", m.Body)
	}
	// Output:
	// ce_specversion: 1.0
	// ce_id: order 7/1
	// ce_source: /shop
	// ce_type: com.example.order.placed
	// ce_time: 2026-01-02T03:04:05Z
	// content-type: application/json
	// {"total":100}
	//
	// ce-specversion: 1.0
	// ce-id: order%207/1
	// ce-source: /shop
	// ce-type: com.example.order.placed
	// ce-time: 2026-01-02T03:04:05Z
	// ce-datacontenttype: application/json
	// {"total":100}
}

func ExampleBinding_Encode_structured() {
	m, err := envelope.NATS.Encode(order(), envelope.Structured)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Printf("%s: %s\n%s\n", m.Header[0].Name, m.Header[0].Value, m.Body)
	// Output:
	// Content-Type: application/cloudevents+json; charset=UTF-8
	// {"specversion":"1.0","id":"order 7/1","source":"/shop","type":"com.example.order.placed","time":"2026-01-02T03:04:05Z","datacontenttype":"application/json","data":{"total":100}}
}

func ExampleDecode() {
	raw := &envelope.Message{Topic: "orders", Body: []byte(`{"total":100}`)}
	raw.Header.Add("ce_specversion", []byte("1.0"))
	raw.Header.Add("ce_id", []byte("order 7/1"))
	raw.Header.Add("ce_source", []byte("/shop"))
	raw.Header.Add("ce_type", []byte("com.example.order.placed"))
	raw.Header.Add("content-type", []byte("application/json"))
	raw.Header.Add("tenant", []byte("acme"))

	m, err := envelope.Decode(raw)
	if err != nil {
		fmt.Println(err)
		return
	}
	tenant, _ := m.Header.Get("Tenant")
	fmt.Println(m.Source, m.ID, m.Type, m.ContentType)
	fmt.Printf("%s for %s, %d line left\n", m.Body, tenant, len(m.Header))
	// Output:
	// /shop order 7/1 com.example.order.placed application/json
	// {"total":100} for acme, 1 line left
}

func ExampleCloudEvents() {
	raw := &envelope.Message{Body: []byte(`{"specversion":"1.0","id":"7","source":"/shop","type":"t"}`)}
	raw.Header.Add("Content-Type", []byte("application/cloudevents+json; charset=utf-8"))

	id, err := envelope.CloudEvents().Identify(raw)
	fmt.Println(id.Source, id.ID, err)
	// Output: /shop 7 <nil>
}

func ExampleFromHeader() {
	raw := &envelope.Message{Topic: "orders"}
	raw.Header.Add("Message-Id", []byte("7"))

	id, err := envelope.FromHeader("message-id", "").Identify(raw)
	fmt.Println(id.Source, id.ID, err)
	id, err = envelope.FromHeader("message-id", "legacy shop").Identify(raw)
	fmt.Println(id.Source, id.ID, err)
	// Output:
	// orders 7 <nil>
	// legacy shop 7 <nil>
}

func ExampleExtractorFunc() {
	byKey := envelope.ExtractorFunc(func(m *envelope.Message) (envelope.Identity, error) {
		if len(m.Key) == 0 {
			return envelope.Identity{}, envelope.ErrNoID
		}
		return envelope.Identity{Source: m.Topic, ID: string(m.Key)}, nil
	})
	id, err := byKey.Identify(&envelope.Message{Topic: "payments", Key: []byte("p-1")})
	fmt.Println(id, err)
	// Output: {payments p-1} <nil>
}

func ExampleReason() {
	_, err := envelope.Decode(&envelope.Message{Body: []byte("hello")})
	fmt.Println(envelope.Reason(err), errors.Is(err, envelope.ErrNoID))
	// Output: missing_id true
}

func ExampleFormatError() {
	raw := &envelope.Message{Body: []byte("[]")}
	raw.Header.Add("content-type", []byte("application/cloudevents-batch+json"))

	_, err := envelope.Decode(raw)
	var f *envelope.FormatError
	if errors.As(err, &f) {
		fmt.Println(f.Reason, "in", f.Field)
	}
	fmt.Println(err)
	// Output:
	// batch_unsupported in content-type
	// envelope: content-type: batches are not supported; the producer must write one event for each message
}

func ExampleNewID() {
	a, b := envelope.NewID(), envelope.NewID()
	fmt.Println(len(a), a < b)
	// Output: 36 true
}

func ExampleMessage_Clone() {
	m := order()
	c := m.Clone()
	c.Body[0] = '['
	fmt.Println(string(m.Body), string(c.Body))
	// Output: {"total":100} ["total":100}
}

func ExampleHeader() {
	var h envelope.Header
	h.Add("Trace", []byte("1"))
	h.Add("trace", []byte("2"))
	first, _ := h.Get("TRACE")
	fmt.Printf("%s %q\n", first, h.Values("TRACE"))

	h.Set("trace", []byte("3"))
	fmt.Printf("%q\n", h.Values("Trace"))
	h.Del("Trace")
	fmt.Println(len(h))
	// Output:
	// 1 ["1" "2"]
	// ["3"]
	// 0
}
