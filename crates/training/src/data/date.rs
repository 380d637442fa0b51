//! The pinned date behind `strftime_now`: some templates print today's date into the prompt, and a
//! run must not depend on the day it is made.

use super::error::DataError;

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];

/// A day of the Gregorian calendar; the time is midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Date {
    year: u32,
    month: u32,
    day: u32,
}

impl Date {
    /// `YYYY-MM-DD`.
    pub(super) fn parse(text: &str) -> Result<Self, DataError> {
        let wrong =
            || DataError::Setting { setting: "date", why: format!("`{text}` is not a date written as YYYY-MM-DD") };
        let digits = |range| text.get(range).filter(|part: &&str| part.bytes().all(|byte| byte.is_ascii_digit()));
        let number = |range| digits(range).and_then(|part| part.parse::<u32>().ok()).ok_or_else(wrong);
        if text.len() != 10 || text.get(4..5) != Some("-") || text.get(7..8) != Some("-") {
            return Err(wrong());
        }
        let date = Self { year: number(0..4)?, month: number(5..7)?, day: number(8..10)? };
        let sound = date.year > 0 && (1..=12).contains(&date.month) && date.day > 0 && date.day <= date.month_length();
        if sound { Ok(date) } else { Err(wrong()) }
    }

    fn leap(self) -> bool {
        self.year.is_multiple_of(4) && (!self.year.is_multiple_of(100) || self.year.is_multiple_of(400))
    }

    fn month_length(self) -> u32 {
        match self.month {
            2 => 28 + u32::from(self.leap()),
            4 | 6 | 9 | 11 => 30,
            _ => 31,
        }
    }

    /// 1 to 366.
    fn day_of_year(self) -> u32 {
        (1..self.month).map(|month| Self { month, ..self }.month_length()).sum::<u32>() + self.day
    }

    /// Counted from 0, Sunday.
    fn weekday(self) -> u32 {
        let past = self.year - 1;
        (past * 365 + past / 4 - past / 100 + past / 400 + self.day_of_year()) % 7
    }

    /// `strftime` in the C locale. `None` for an unsupported directive.
    pub(super) fn strftime(self, format: &str) -> Option<String> {
        let Self { year, month, day } = self;
        let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[self.weekday() as usize]);
        let mut text = String::new();
        let mut characters = format.chars();
        while let Some(character) = characters.next() {
            if character != '%' {
                text.push(character);
                continue;
            }
            let directive = characters.next()?;
            let (directive, padded) = if directive == '-' { (characters.next()?, false) } else { (directive, true) };
            let padded_to = |number: u32, width: usize| {
                if padded { format!("{number:0width$}") } else { number.to_string() }
            };
            let part = match directive {
                'Y' => padded_to(year, 4),
                'y' => padded_to(year % 100, 2),
                'm' => padded_to(month, 2),
                'd' => padded_to(day, 2),
                'e' if padded => format!("{day:2}"),
                'e' => day.to_string(),
                'j' => padded_to(self.day_of_year(), 3),
                'B' => month_name.to_owned(),
                'b' | 'h' => month_name[..3].to_owned(),
                'A' => day_name.to_owned(),
                'a' => day_name[..3].to_owned(),
                'H' | 'M' | 'S' => padded_to(0, 2),
                'I' => "12".to_owned(),
                'p' => "AM".to_owned(),
                'F' => format!("{year:04}-{month:02}-{day:02}"),
                'D' | 'x' => format!("{month:02}/{day:02}/{:02}", year % 100),
                'T' | 'X' => "00:00:00".to_owned(),
                'R' => "00:00".to_owned(),
                'n' => "\n".to_owned(),
                't' => "\t".to_owned(),
                '%' => "%".to_owned(),
                _ => return None,
            };
            text.push_str(&part);
        }
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calendar_is_right() {
        let format = |date: &str, format: &str| Date::parse(date).expect("a day").strftime(format);
        assert_eq!(format("2024-07-26", "%d %b %Y, %A").as_deref(), Some("26 Jul 2024, Friday"));
        assert_eq!(format("2000-02-29", "%j %a %-d.%-m.%y %%").as_deref(), Some("060 Tue 29.2.00 %"));
        assert_eq!(format("2025-01-01", "%B %e %H:%M %F").as_deref(), Some("January  1 00:00 2025-01-01"));
        assert_eq!(format("2025-01-01", "%Q"), None);
        assert_eq!(format("2025-01-01", "%"), None);
    }

    #[test]
    fn no_day_is_an_error() {
        for text in ["", "2025-13-01", "2025-02-29", "2025-00-10", "25-01-01", "2025/01/01", "2025-+1-01", "0000-01-01"]
        {
            assert!(Date::parse(text).is_err(), "{text}");
        }
    }
}
