package envelope_test

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/unecho/unecho/envelope"
)

func TestB14DataTwice(t *testing.T) {
	t.Parallel()
	for members, reason := range map[string]string{
		`,"data":{},"data_base64":"e30="`:                 envelope.ReasonDataTwice,
		`,"data_base64":"","data":""`:                     envelope.ReasonDataTwice,
		`,"data":null,"data_base64":"e30="`:               envelope.ReasonDataTwice,
		`,"data_base64":"e30"`:                            envelope.ReasonBadBase64,
		`,"data_base64":"e3*="`:                           envelope.ReasonBadBase64,
		`,"data_base64":"__8="`:                           envelope.ReasonBadBase64,
		`,"data_base64":7`:                                envelope.ReasonNotAString,
		`,"data":1,"data":1`:                              envelope.ReasonDuplicateMember,
		`,"data_base64":null,"data_base64":"e30="`:        envelope.ReasonDuplicateMember,
		`,"id":"e-1"`:                                     envelope.ReasonDuplicateMember,
		`,"\u0069d":"e-2"`:                                envelope.ReasonDuplicateMember,
		`,"source":"/x"`:                                  envelope.ReasonDuplicateMember,
		`,"specversion":null`:                             envelope.ReasonDuplicateMember,
		`,"subject":null,"subject":"s"`:                   envelope.ReasonDuplicateMember,
		`,"datacontenttype":"text/plain","data":"\ud800"`: envelope.ReasonBadEncoding,
	} {
		t.Run(members, func(t *testing.T) {
			t.Parallel()
			refuse(t, withMembers(members), reason)
		})
	}
}

func TestB14PayloadIsNotRewritten(t *testing.T) {
	t.Parallel()
	for members, want := range map[string][]byte{
		``:                    nil,
		`,"data_base64":null`: nil,
		`,"data":null`:        []byte("null"),
		`,"data":""`:          []byte(`""`),
		`,"data" : {"b" : 1e2, "b":12345678901234567890.10,"a":"\u0000"}  `: []byte(`{"b" : 1e2, "b":12345678901234567890.10,"a":"\u0000"}`),
		`,"data":"\ud800"`:                                                      []byte(`"\ud800"`), // JSON, and nobody's business
		`,"data":[1,"]",{"x":"\"}"}]`:                                           []byte(`[1,"]",{"x":"\"}"}]`),
		`,"data":true,"datacontenttype":"application/json"`:                     []byte("true"),
		`,"data":"","datacontenttype":"text/plain"`:                             {},
		`,"data":null,"datacontenttype":"text/plain"`:                           nil,
		`,"data":{"a": 1},"datacontenttype":"text/plain"`:                       []byte(`{"a": 1}`),
		`,"data":"<a>\n\u20ac\ud83d\ude00","datacontenttype":"application/xml"`: []byte("<a>\n€😀"),
		`,"data_base64":""`:                                                     {},
		`,"data_base64":"AP8="`:                                                 {0, 0xff},
		`,"data_base64":"AP\r\n8="`:                                             {0, 0xff},
		`,"data_base64":"e30=","datacontenttype":"application/json"`:            []byte("{}"),
	} {
		d := decode(t, withMembers(members))
		if !bytes.Equal(d.Body, want) || (d.Body == nil) != (want == nil) {
			t.Errorf("%s: body %q, want %q (nil %v)", members, d.Body, want, want == nil)
		}
		if isJSON := d.ContentType == "application/json"; isJSON && strings.Contains(members, `"data"`) && cap(d.Body) > len(d.Body) {
			t.Errorf("%s: appending to the body would write into the message", members)
		}
		implied := strings.HasPrefix(members, `,"data"`) && !strings.Contains(members, "datacontenttype")
		if implied != (d.ContentType == "application/json") && !strings.Contains(members, "application/json") {
			t.Errorf("%s: content type %q", members, d.ContentType)
		}
	}
}

func TestDecodeBombs(t *testing.T) {
	t.Parallel()
	deep := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	refuse(t, withMembers(`,"data":`+strings.Repeat("[", 1_000_000)), envelope.ReasonBadJSON)
	refuse(t, withMembers(`,"data":`+deep(1_000_000)), envelope.ReasonBadJSON)
	refuse(t, withMembers(`,"ext":`+strings.Repeat(`{"a":`, 100_000)+"1"+strings.Repeat("}", 100_000)), envelope.ReasonBadJSON)
	refuse(t, &envelope.Message{Body: []byte(`{"specversion":"1.0","x":` + deep(1_000_000) + `}`)}, envelope.ReasonMissingID)
	if d := decode(t, withMembers(`,"data":`+deep(9_999))); len(d.Body) != 2*9_999 {
		t.Errorf("body of %d bytes", len(d.Body))
	}
	m := sample().kafka()
	for i := range 10_000 {
		m.Header.Add(fmt.Sprint("ce_x", i), []byte("v"))
		m.Header.Add(fmt.Sprint("own", i), []byte("v"))
	}
	if d := decode(t, m); len(d.Extensions) != 10_000 || len(d.Header) != 10_000 {
		t.Errorf("%d extensions, %d lines", len(d.Extensions), len(d.Header))
	}
	if d := decode(t, withMembers(strings.Repeat(`,"x":1`, 100_000))); len(d.Extensions) != 1 {
		t.Errorf("%d extensions", len(d.Extensions))
	}
}

func TestB02OddExtensionsAreTolerated(t *testing.T) {
	t.Parallel()
	d := decode(t, withMembers(`,"confluentRouting":{"a": [1, "}"]},"n":7,"b":true,"f":1.5,"none":null,"s":"v",
		"under_score":"u","with space":"x","":"x","ünï":"x","ID":"other","\u212aelvin":"x","lone":"\ud800","data_base_64":"ok"`))
	want := map[string]string{"confluentrouting": `{"a": [1, "}"]}`, "n": "7", "b": "true", "f": "1.5", "s": "v",
		"under_score": "u", "data_base_64": "ok"}
	if !reflect.DeepEqual(d.Extensions, want) {
		t.Errorf("extensions %q, want %q", d.Extensions, want)
	}
	m := sample("confluentRouting", "{}", "with space", "x", "", "x", "data", "x", "bad", "\xff").kafka()
	if d := decode(t, m); !reflect.DeepEqual(d.Extensions, map[string]string{"confluentrouting": "{}"}) || d.Header != nil {
		t.Errorf("extensions %q, header %q", d.Extensions, d.Header)
	}
}

func TestB02ExtensionThatSaysTwoThingsIsLeftOut(t *testing.T) {
	t.Parallel()
	m := sample("traceparent", "1").kafka()
	m.Header.Add("CE_TraceParent", []byte("2"))
	m.Header.Add("ce_traceparent", []byte("1"))
	m.Header.Add("ce_twice", []byte("same"))
	m.Header.Add("ce-twice", []byte("same"))
	want := map[string]string{"twice": "same"}
	if d := decode(t, m); !reflect.DeepEqual(d.Extensions, want) {
		t.Errorf("extensions %q, want %q", d.Extensions, want)
	}
	if d := decode(t, withMembers(`,"a":"1","A":"2","a":"1","twice":"same","Twice":"same"`)); !reflect.DeepEqual(d.Extensions, want) {
		t.Errorf("extensions %q, want %q", d.Extensions, want)
	}
}
